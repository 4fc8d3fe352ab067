"""One tier from the coordinator's side: contents, breakers, shares of the pool, times of loads. Pure data."""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

from kvtier_core.coordinator.breaker import Breaker
from kvtier_core.coordinator.jobs import Job, JobKind
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.coordinator.presence import Presence
from kvtier_core.coordinator.stats import JobTimes, TierCounters
from kvtier_core.tier_settings import TierLimits
from kvtier_core.values import RequestInfo, TierInfo

if TYPE_CHECKING:
    from kvtier_core.coordinator.request_state import RequestState
    from kvtier_core.keys import OffloadKey

_REMEMBERED = 8
"""Loads that a prediction rests on: few, so that a handful of others brings a new one about."""
_ENOUGH = 3
"""Loads below which there is no prediction."""


@dataclass(frozen=True, kw_only=True)
class TierSpec:
    """One configured tier as the coordinator needs it."""

    name: str
    info: TierInfo
    limits: TierLimits
    store_threshold: int = 1
    """Offers from which on the tier is given a block."""


class Service:
    """Lookups, loads or stores of a tier.

    Each has a breaker of its own: a full disk still serves what it holds, and quick lookups do not hide stalled loads.
    """

    def __init__(self, limits: PoolLimits, timeout_s: float, times: JobTimes) -> None:
        self.timeout_s = timeout_s
        self.breaker = Breaker(limits.breaker_failures, limits.breaker_pause_s, limits.breaker_max_pause_s)
        self.unanswered = 0
        """Overdue jobs whose results are still due."""
        self.max_unanswered = limits.max_unanswered
        self._times = times

    @property
    def owes(self) -> bool:
        """Whether no more jobs go until some of these are answered. Loads are bounded by their rows instead."""
        return self.unanswered >= self.max_unanswered

    def count_time(self, job: Job, now: float) -> float:
        """The result of *job* came before its deadline; the seconds since its submission."""
        seconds = now - job.begun
        self._times.jobs += 1
        self._times.seconds += seconds
        return seconds


class LoadTimes:
    """How long loads from one tier take (C35): a fixed time and one for each block, judged by the last loads."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._model: tuple[float, float] | None = None

    def add(self, blocks: int, seconds: float) -> None:
        """A load of *blocks* took *seconds*."""
        self._samples.append((blocks, seconds))
        self._model = None

    @property
    def model(self) -> tuple[float, float] | None:
        """Fixed seconds and seconds a block; ``None`` while too little is known.

        Both are medians, which no single outlier moves: of the slopes between any two loads, and of the rests. Loads of
        one size alone have no slope, and count as proportional to their size.
        """
        if self._model is None and len(self._samples) >= _ENOUGH:
            slopes = [(t - s) / (m - n) for (n, s), (m, t) in combinations(self._samples, 2) if n != m]
            if slopes:
                per_block = max(0.0, median(slopes))
            else:
                per_block = median(seconds / blocks for blocks, seconds in self._samples)
            fixed = median(seconds - blocks * per_block for blocks, seconds in self._samples)
            self._model = (max(0.0, fixed), per_block)
        return self._model

    def describe(self) -> dict[str, float] | None:
        """The prediction for people: ``fixed`` and ``per_block`` seconds."""
        return None if self.model is None else dict(zip(("fixed", "per_block"), self.model, strict=True))

    def predict(self, blocks: int) -> float | None:
        """Seconds that a load of *blocks* would take; ``None`` while too little is known."""
        if self.model is None:
            return None
        fixed, per_block = self.model
        return fixed + blocks * per_block


class TierRecord:
    """One tier, from the coordinator's side."""

    def __init__(
        self, spec: TierSpec, num_rows: int, pool_limits: PoolLimits, slowest_lookup_s: float
    ) -> None:
        limits = spec.limits
        self.name = spec.name
        self.limits = limits
        self.store_threshold = spec.store_threshold
        self.counters = TierCounters()
        self.presence = Presence(
            ttl_s=pool_limits.presence_ttl_s + slowest_lookup_s,
            miss_ttl_s=limits.miss_ttl,
            limit=pool_limits.max_remembered,
        )
        self.lookups = Service(pool_limits, limits.lookup_timeout, self.counters.lookups)
        self.loads = Service(pool_limits, limits.load_timeout, self.counters.loads)
        self.stores = Service(pool_limits, limits.store_timeout, self.counters.stores)
        self.max_quarantined_rows = max(1, int(num_rows * limits.max_quarantined))
        self.max_cascade_rows = max(1, int(num_rows * limits.max_cascade))
        self.quarantined_rows = 0
        self.loading_rows = 0
        """Rows reserved for promotions from it, or under way and not overdue."""
        self.loads_in_time = False
        """Its last load came in time. Until then it is lent no more than its quarantine may hold."""
        self.cascade_rows = 0
        self.late: deque[tuple[RequestState, OffloadKey]] = deque()
        """Blocks of whole requests that wait for room among ``max_cascade_rows``; evictable meanwhile."""
        self.missed: OrderedDict[OffloadKey, RequestInfo] = OrderedDict()
        """Blocks that it did not get, as many as the pool has rows at most, and of which request: the oldest first."""
        self.load_times = LoadTimes()
        self.probe_at: float | None = None
        """When it gets a load as a probe; ``None`` while it is not passed over (C35)."""
        self.has_jobs_this_step = False
        """It got a job since the last end of a step."""
        self.serving = False
        """It is open and serves the current namespace; until then it is neither asked nor given anything."""

    @property
    def services(self) -> tuple[Service, Service, Service]:
        """Lookups, loads, stores."""
        return self.lookups, self.loads, self.stores

    def service(self, kind: JobKind) -> Service:
        """The service that jobs of *kind* are for."""
        if kind is JobKind.TIER_STORE:
            return self.stores
        return self.loads if kind is JobKind.TIER_LOAD else self.lookups

    @property
    def is_catching_up(self) -> bool:
        """Whether it gets more of what it missed as soon as the stores that it has are over."""
        return bool(self.missed) and self.cascade_rows > 0

    def may_ask(self, now: float) -> bool:
        """Whether lookups may go to this tier: only where a load could follow."""
        return (
            self.serving
            and not self.lookups.owes
            and self.lookups.breaker.allows(now)
            and self.loads.breaker.allows(now)
        )

    def may_store(self, now: float) -> bool:
        """Whether cascades may go to this tier."""
        return self.serving and not self.stores.owes and self.stores.breaker.allows(now)

    def may_promote(self, now: float) -> bool:
        """Whether loads from this tier may start."""
        is_full = self.quarantined_rows >= self.max_quarantined_rows
        return self.serving and self.loads.breaker.allows(now) and not is_full

    @property
    def load_room(self) -> float:
        """Rows that promotions from it may still take, apart from the pool's own limits (C31).

        A tier whose loads come in time has no limit of its own. At any other, every row lent may end in quarantine, and
        counts as if it had.
        """
        if self.loads_in_time:
            return math.inf
        return self.max_quarantined_rows - self.quarantined_rows - self.loading_rows
