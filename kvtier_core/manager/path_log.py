"""Tells people when a tier leaves the path, when it is back, and that its work takes too long, or never ends.

An engine sees misses and time of a faulty tier; this says which tier it is, and what to do. Decides nothing.
"""

from collections.abc import Mapping

from kvtier_core.coordinator.breaker import BreakerState
from kvtier_core.coordinator.tier_record import TierRecord
from kvtier_core.manager.guard import Guard

_KINDS = ("lookups", "loads", "stores")
"""What each of a tier's breakers stops."""


class PathLog:
    """Looks at the tiers' breakers and time-outs, and logs what has changed since its last look."""

    def __init__(self, guards: Mapping[str, Guard]) -> None:
        self._guards = guards
        self._out: dict[str, list[str]] = {}
        self._owing: dict[str, list[str]] = {}
        self._timeouts: dict[str, int] = {}

    def look(self, tiers: Mapping[str, TierRecord]) -> None:
        """Log changes. Cost: a few comparisons a tier."""
        for name, tier in tiers.items():
            services = dict(zip(_KINDS, tier.services, strict=True))
            late = tier.counters.timeouts
            if late != self._timeouts.get(name, 0):
                _tell_late(self._guards[name], late - self._timeouts.get(name, 0))
                self._timeouts[name] = late
            out = [k for k, service in services.items() if service.breaker.state is not BreakerState.CLOSED]
            if out != self._out.get(name, []):
                _tell_path(self._guards[name], out)
                self._out[name] = out
            owing = [kind for kind in ("lookups", "stores") if services[kind].owes]
            if owing != self._owing.get(name, []):
                _tell_owing(self._guards[name], owing, tier.stores.max_unanswered)
                self._owing[name] = owing


def _tell_path(guard: Guard, out: list[str]) -> None:
    if out:
        guard.tell(
            f"is out of the path for {' and '.join(out)} after failures in a row: it is passed over, and tried again "
            "after growing pauses; see the warnings before this one"
        )
    else:
        guard.tell(f"is in the path again{guard.take_untold()}")


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
