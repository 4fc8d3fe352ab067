"""Tells people when a tier leaves the path, when it is back, and that its work takes too long, or never ends.

An engine sees misses and time of a faulty tier; this says which tier it is, and what to do. Decides nothing.
"""

from collections.abc import Mapping

from kvtier_core.coordinator.tier_record import TierRecord
from kvtier_core.manager.guard import Guard

_KINDS = ("lookups", "loads", "stores")
"""What each of a tier's breakers stops."""


class PathLog:
    """Looks at the tiers' breakers and time-outs, and logs what has changed since its last look."""

    def __init__(self, guards: Mapping[str, Guard]) -> None:
        self._guards = guards
        self._seen: dict[str, tuple[int, list[str], list[str]]] = {}
        """By tier: how often it was late, what it is out of the path for, and what it owes answers of."""
        self._out_since: dict[str, float] = {}

    def look(self, tiers: Mapping[str, TierRecord], now: float) -> None:
        """Log changes. Cost: a few comparisons a tier."""
        for name, tier in tiers.items():
            guard, services = self._guards[name], dict(zip(_KINDS, tier.services, strict=True))
            late = tier.counters.timeouts
            out = [k for k, service in services.items() if not service.breaker.is_closed]
            owing = [kind for kind in ("lookups", "stores") if services[kind].owes]
            was_late, was_out, was_owing = self._seen.get(name, (0, [], []))
            self._seen[name] = late, out, owing
            if late != was_late:
                _tell_late(guard, late - was_late)
            if out != was_out:
                since = self._out_since.setdefault(name, now)
                _tell_path(guard, out, now - since)
            if not out:
                self._out_since.pop(name, None)
            if owing != was_owing:
                _tell_owing(guard, owing, tier.stores.max_unanswered)


def _tell_path(guard: Guard, out: list[str], seconds: float) -> None:
    if out:
        guard.tell(
            f"is out of the path for {' and '.join(out)} after failures in a row: it is passed over, and tried again "
            "after growing pauses; see the warnings before this one"
        )
    else:
        guard.tell(f"is in the path again after {seconds:.0f} s{guard.take_untold()}")


def _tell_owing(guard: Guard, owing: list[str], limit: int) -> None:
    if owing:
        guard.tell(
            f"has left {limit} overdue {' and as many '.join(owing)} without any answer: it gets no more of them until "
            "it hands out results for some. Every job must get a result, if only an error: tell the plugin's author"
        )
    else:
        guard.tell("has answered overdue jobs, and gets new ones again")


def _tell_late(guard: Guard, times: int) -> None:
    guard.report(
        "late answer",
        "it did not answer in time, and requests went on without it. If its storage is as fast as it can be, raise "
        "limits.lookup_timeout, load_timeout or store_timeout",
        times=times,
    )
