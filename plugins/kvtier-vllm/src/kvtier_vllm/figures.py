"""What kvtier counts, as vLLM's Prometheus endpoint shows it: names, labels and what they mean.

Decides the names. Counters only grow; ``Figures`` remembers what was reported, because vLLM wants what is new.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvtier_core.engine import Hints, MissReason, TierManager

PREFIX = "vllm:kvtier_"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One metric. ``label`` is the name of its one label, empty where there is none."""

    kind: Literal["counter", "gauge"]
    label: str
    help: str


_TIMED = ("lookup", "load", "store")

FIGURES = {
    "hit_blocks": Figure(
        kind="counter", label="source", help="Blocks loaded to the device, by where they came from"
    ),
    "misses": Figure(
        kind="counter", label="reason", help="Lookups that ended at a block, by why it was not there"
    ),
    "device_stored_blocks": Figure(
        kind="counter", label="", help="Blocks stored from the device to the pool"
    ),
    "evicted_blocks": Figure(kind="counter", label="", help="Blocks evicted from the pool"),
    "hints": Figure(kind="counter", label="kind", help="Hints of requests, those not understood as unknown"),
    "not_kept_blocks": Figure(
        kind="counter", label="", help="Blocks that hints were to keep in the pool, and that found no place"
    ),
    "tier_stored_blocks": Figure(kind="counter", label="tier", help="Blocks stored from the pool to a tier"),
    "tier_loaded_blocks": Figure(kind="counter", label="tier", help="Blocks loaded from a tier to the pool"),
    "tier_store_failed_blocks": Figure(kind="counter", label="tier", help="Blocks a tier could not store"),
    "tier_load_failed_blocks": Figure(
        kind="counter", label="tier", help="Blocks a tier held and could not load"
    ),
    "tier_load_missing_blocks": Figure(
        kind="counter", label="tier", help="Blocks a tier turned out not to hold"
    ),
    "tier_dropped_blocks": Figure(
        kind="counter", label="tier", help="Blocks left out because a tier was behind"
    ),
    "tier_made_up_blocks": Figure(
        kind="counter", label="tier", help="Blocks left out that a tier was given later, while it was idle"
    ),
    "tier_integrity_misses": Figure(
        kind="counter", label="tier", help="Blocks that came back with wrong bytes"
    ),
    "tier_faults": Figure(kind="counter", label="tier", help="Hooks that raised or answered nonsense"),
    "tier_timeouts": Figure(kind="counter", label="tier", help="Jobs that passed their deadline"),
    **{
        f"tier_{kind}_jobs": Figure(
            kind="counter", label="tier", help=f"{kind.capitalize()} jobs of a tier that ended in time"
        )
        for kind in _TIMED
    },
    **{
        f"tier_{kind}_seconds": Figure(
            kind="counter",
            label="tier",
            help=f"Seconds that those {kind} jobs took, from submission to result",
        )
        for kind in _TIMED
    },
    "tier_serving": Figure(kind="gauge", label="tier", help="1 while a tier is open and serves"),
    "tier_quarantined_rows": Figure(
        kind="gauge", label="tier", help="Rows that overdue loads keep out of use"
    ),
    "pool_rows": Figure(kind="gauge", label="", help="Rows of the pool"),
    "pool_held_rows": Figure(kind="gauge", label="", help="Rows whose blocks hints keep"),
    "pool_pinned_rows": Figure(kind="gauge", label="", help="Those among them that give way to nothing"),
    "pool_free_rows": Figure(kind="gauge", label="", help="Rows that hold no block"),
}
_OF_A_TIER = [name.removeprefix("tier_") for name in FIGURES if name.startswith("tier_")]


class Figures:
    """The figures of one manager. Used by the scheduler's thread."""

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._reported: dict[tuple[str, str], float] = {}

    def take_changes(self) -> Iterator[tuple[str, str, float]]:
        """Name, label's value and amount: of a counter what was added, of a gauge its value where that changed.

        The first call says all of them, those at 0 too: who watches a rate wants to see where it began.
        """
        for name, label, value in self._read():
            reported = self._reported.get((name, label))
            if value != reported:
                self._reported[name, label] = value
                yield name, label, value - (reported or 0) if FIGURES[name].kind == "counter" else value

    def _read(self) -> Iterator[tuple[str, str, float]]:
        figures = self._tiers.figures()
        pool, tiers = figures["pool"], figures["tiers"]
        for source in ("pool", *tiers):
            yield "hit_blocks", source, figures["hit_blocks"].get(source, 0)
        for reason in MissReason:
            yield "misses", reason.value, figures["misses"].get(reason.value, 0)
        for kind in Hints().count():
            yield "hints", kind, figures["hints"].get(kind, 0)
        yield "not_kept_blocks", "", pool["not_kept_blocks"]
        yield "device_stored_blocks", "", pool["stored_blocks"]
        yield "evicted_blocks", "", pool["evicted_blocks"]
        yield "pool_rows", "", pool["rows"]
        yield "pool_free_rows", "", pool["free_rows"]
        yield "pool_held_rows", "", pool["held_rows"]
        yield "pool_pinned_rows", "", pool["pinned_rows"]
        for name, tier in tiers.items():
            for figure in _OF_A_TIER:
                yield f"tier_{figure}", name, tier[figure]
