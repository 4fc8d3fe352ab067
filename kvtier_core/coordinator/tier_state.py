"""The state of one tier: what it holds as far as known, whether it is in the path, how much of the pool it has.

Pure data and its limits; the modules that decide change it.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier_core.coordinator.breaker import Breaker
from kvtier_core.coordinator.jobs import Job, JobKind
from kvtier_core.coordinator.load_times import LoadTimes
from kvtier_core.coordinator.missed import Missed
from kvtier_core.coordinator.presence import Presence
from kvtier_core.coordinator.stats import TierCounters
from kvtier_core.tier_settings import TierLimits
from kvtier_core.values import TierInfo

if TYPE_CHECKING:
    from kvtier_core.coordinator.state import PoolLimits, RequestState
    from kvtier_core.keys import OffloadKey


@dataclass(frozen=True, kw_only=True)
class TierSpec:
    """One configured tier as the deciding part needs it."""

    name: str
    info: TierInfo
    limits: TierLimits
    store_threshold: int = 1
    """Offers from which on the tier is given a block."""


class TierState:
    """One tier: what it holds as far as known, whether it is in the path, how much of the pool it has."""

    def __init__(
        self, spec: TierSpec, num_rows: int, pool_limits: "PoolLimits", slowest_lookup_s: float
    ) -> None:
        limits = spec.limits
        self.name = spec.name
        self.limits = limits
        self.store_threshold = spec.store_threshold
        self.presence = Presence(
            complete=not spec.info.shared,
            ttl_s=pool_limits.presence_ttl_s + slowest_lookup_s,
            miss_ttl_s=limits.miss_ttl,
            limit=pool_limits.max_remembered,
        )
        self.load_breaker = _breaker(pool_limits)
        self.store_breaker = _breaker(pool_limits)
        """Apart from loads, so that a full disk still serves what it holds."""
        self.lookup_breaker = _breaker(pool_limits)
        """Apart from loads, so that quick answers do not hide that every load stalls."""
        self.max_quarantined_rows = max(1, int(num_rows * limits.max_quarantined))
        self.max_cascade_rows = max(1, int(num_rows * limits.max_cascade))
        self.max_unanswered = pool_limits.max_unanswered
        self.unanswered_lookups = 0
        """Lookups that nobody waits for any more and whose answers are still due."""
        self.unanswered_stores = 0
        """Stores of this kind."""
        self.quarantined_rows = 0
        self.loading_rows = 0
        """Rows reserved for promotions from it, or under way and not overdue."""
        self.loads_in_time = False
        """Its last load came before its deadline. Until then it is lent no more than its quarantine may hold."""
        self.cascade_rows = 0
        self.late: deque[tuple[RequestState, OffloadKey]] = deque()
        """Blocks of whole requests that wait for room among ``max_cascade_rows``; evictable meanwhile."""
        self.missed = Missed(num_rows)
        self.load_times = LoadTimes()
        self.probe_at: float | None = None
        """When it gets a load though that would be a loss; ``None`` while it is not passed over (C35)."""
        self.has_jobs_this_step = False
        """It was given a job since the last end of a step."""
        self.serving = False
        """It is open and serves the current namespace; until then it is neither asked nor given anything."""
        self.counters = TierCounters()

    @property
    def breakers(self) -> tuple[Breaker, ...]:
        """All of the tier's breakers."""
        return self.lookup_breaker, self.load_breaker, self.store_breaker

    def breaker_of(self, kind: JobKind) -> Breaker:
        """The breaker that jobs of *kind* count for."""
        match kind:
            case JobKind.TIER_STORE:
                return self.store_breaker
            case JobKind.TIER_LOAD:
                return self.load_breaker
            case _:
                return self.lookup_breaker

    def count_time(self, job: Job, now: float) -> float:
        """The result of *job* came before its deadline; the seconds since its submission."""
        match job.kind:
            case JobKind.TIER_STORE:
                times, limit = self.counters.stores, self.limits.store_timeout
            case JobKind.TIER_LOAD:
                times, limit = self.counters.loads, self.limits.load_timeout
            case _:
                times, limit = self.counters.lookups, self.limits.lookup_timeout
        seconds = limit - (job.deadline - now)
        times.jobs += 1
        times.seconds += seconds
        return seconds

    def count_unanswered(self, kind: JobKind, change: int) -> None:
        """So many more jobs of *kind* are overdue. Those of loads are bounded by their rows (``quarantined_rows``)."""
        if kind is JobKind.LOOKUP:
            self.unanswered_lookups += change
        elif kind is JobKind.TIER_STORE:
            self.unanswered_stores += change

    @property
    def is_catching_up(self) -> bool:
        """Whether it gets more of what it missed as soon as the stores that it has are over."""
        return self.missed.num_keys > 0 and self.cascade_rows > 0

    @property
    def owes_lookups(self) -> bool:
        """Whether it gets no more lookups until it answers some that are overdue."""
        return self.unanswered_lookups >= self.max_unanswered

    @property
    def owes_stores(self) -> bool:
        """Whether it gets no more stores until it answers some that are overdue."""
        return self.unanswered_stores >= self.max_unanswered

    def may_ask(self, now: float) -> bool:
        """Whether lookups may go to this tier: only where a load could follow."""
        return (
            self.serving
            and not self.owes_lookups
            and self.lookup_breaker.allows(now)
            and self.load_breaker.allows(now)
        )

    def may_store(self, now: float) -> bool:
        """Whether cascades may go to this tier."""
        return self.serving and not self.owes_stores and self.store_breaker.allows(now)

    def may_promote(self, now: float) -> bool:
        """Whether loads from this tier may start."""
        return (
            self.serving
            and self.load_breaker.allows(now)
            and self.quarantined_rows < self.max_quarantined_rows
        )

    @property
    def load_room(self) -> float:
        """Rows that promotions from it may still take, as far as the tier itself is concerned (C31).

        A tier whose loads come in time is bounded by the pool's limits alone. Of one that has not shown it yet, or
        whose last load came too late, every row lent may end in quarantine, and counts as if it had.
        """
        if self.loads_in_time:
            return math.inf
        return self.max_quarantined_rows - self.quarantined_rows - self.loading_rows


def _breaker(limits: "PoolLimits") -> Breaker:
    return Breaker(limits.breaker_failures, limits.breaker_pause_s, limits.breaker_max_pause_s)
