"""Decides which failed calls on a tier are made again, and when. Pure; holds no state."""

from dataclasses import dataclass

from kvtier_core.manager.blocking.calls import CallOutcome, Fault
from kvtier_core.manager.blocking.work import Kind, Unit

_LONGEST_PAUSE = 1 << 6  # times the first pause


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """At most *limit* calls more after the first, each after a pause twice as long as the one before, in seconds.

    Two more calls outlast a connection that was closed while idle, and a server that restarts is the breaker's affair.
    """

    limit: int = 2
    first_pause_s: float = 0.1

    def due(self, unit: Unit, outcome: CallOutcome, now: float) -> float | None:
        """When to call the tier again for *unit*, whose call has just ended so; ``None`` when that was the last."""
        if not isinstance(outcome, Fault) or not outcome.is_transient:
            return None
        if unit.kind in (Kind.DELETE, Kind.MARK) or unit.tries >= self.limit:
            return None
        due = now + self.first_pause_s * min(1 << unit.tries, _LONGEST_PAUSE)
        return due if due < unit.deadline else None
