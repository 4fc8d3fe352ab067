"""What a tier on the hook specs says that it holds (``TierInfo.reports_contents``).

Stores and loads correct it: what a store put there is there, what a load missed is not.
"""

import threading
from collections.abc import Sequence

from kvtier_core.coordinator import JobKind
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.answers import plain_keys
from kvtier_core.manager.blocking.presence import PresenceSet
from kvtier_core.values import JobResult, TierJob


class ReportedContents:
    """The keys of one tier, at most *limit*. From any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # guards the two below
        self._keys = PresenceSet(limit, complete=True)
        self._arriving: set[OffloadKey] = set()
        """Keys of stores under way that were not said to be gone again meanwhile."""

    @property
    def keys(self) -> PresenceSet:
        """The keys that the tier holds."""
        with self._lock:
            return self._keys

    def clear(self) -> None:
        """The tier begins to report anew."""
        with self._lock:
            self._keys = PresenceSet(self._limit, complete=True)
            self._arriving.clear()

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """The tier says that it holds these. Raises ``TypeError`` for what are no keys."""
        plain = plain_keys("keys", keys)
        with self._lock:
            self._keys.add(plain)

    def evicted(self, keys: Sequence[OffloadKey]) -> None:
        """The tier says that it does not hold these any more. Raises ``TypeError`` for what are no keys."""
        plain = plain_keys("keys", keys)
        with self._lock:
            self._arriving.difference_update(plain)
            self._keys.discard(plain)

    def begin(self, kind: JobKind, job: TierJob) -> None:
        """The tier gets a job."""
        if kind is JobKind.TIER_STORE:
            with self._lock:
                self._arriving.update(job.keys)

    def end(self, kind: JobKind, job: TierJob, result: JobResult) -> None:
        """The tier has answered a job."""
        lost = {*result.missing, *result.failed}
        if kind is JobKind.TIER_STORE:
            if result.error is not None and not lost:
                lost.update(job.keys)
            with self._lock:
                self._keys.add(key for key in job.keys if key in self._arriving and key not in lost)
                self._arriving.difference_update(job.keys)
        elif kind is JobKind.TIER_LOAD:
            self.evicted(result.missing)
