"""Collects what changes in the pool and in the tiers (C16), once somebody wants to know.

A tier is asked on its own thread, one question at a time: its answer comes with a later call. Used by the engine's
thread.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import BlockState, Ledger
from kvtier_core.manager.events import Changed
from kvtier_core.manager.port import TierPort
from kvtier_core.values import TierEvent

POOL = "pool"

MAX_CHANGES = 65_536
"""Kept of a tier for a taker of events: some MiB."""


class EventLog:
    """Changes in order, at most *limit* of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changes: list[tuple[Literal["stored", "removed"], OffloadKey]] | None = None

    def record(self, kind: Literal["stored", "removed"], keys: Sequence[OffloadKey]) -> None:
        """Note a change, if anybody listens."""
        if self._changes is None:
            return
        self._changes.extend((kind, key) for key in keys)
        if len(self._changes) > self._limit:
            self._changes = None

    def take(self, contents: Callable[[], Sequence[OffloadKey]]) -> list[TierEvent]:
        """The events since the last call; *contents* is asked only when they have to start anew."""
        changes, self._changes = self._changes, []
        if changes is None:
            keys = tuple(contents())
            return [TierEvent(kind="cleared"), *([TierEvent(kind="stored", keys=keys)] if keys else [])]
        return [
            TierEvent(kind=kind, keys=tuple(key for _, key in run))
            for kind, run in itertools.groupby(changes, key=operator.itemgetter(0))
        ]


class Changes:
    """The events of one manager: of the pool, at most *limit* changes between two questions, and of its tiers."""

    def __init__(self, ledger: Ledger, limit: int) -> None:
        self._ledger = ledger
        self._pool = EventLog(limit)
        self._waiting: list[tuple[str, TierEvent]] = []
        self._asked: set[str] = set()

    def take(self, ports: Iterable[TierPort]) -> list[tuple[str, TierEvent]]:
        """The changes since the last call, each with its place: ``pool`` or a tier's name. Asks *ports* for more."""
        self._ledger.note = self._pool.record
        events = [(POOL, event) for event in self._pool.take(self._contents)]
        events += self._waiting
        self._waiting = []
        for port in ports:
            if port.identity.name not in self._asked and port.ask_changes():
                self._asked.add(port.identity.name)
        return events

    def add(self, changed: Changed) -> None:
        """A tier answered."""
        self._asked.discard(changed.tier)
        self._waiting += [(changed.tier, event) for event in changed.events]

    def _contents(self) -> list[OffloadKey]:
        return [block.key for block in self._ledger.blocks if block.state is BlockState.READY]
