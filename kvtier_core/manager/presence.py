"""The set of keys a tier is believed to hold, readable from any thread without I/O and without a hook."""

import threading
from collections.abc import Iterable, Sequence

from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.answers import plain_keys
from kvtier_core.manager.changes import EventLog
from kvtier_core.values import JobResult, TierEvent, TierJob


class PresenceSet:
    """Keys a tier holds, at most *limit* of them, and what changed among them for who asks.

    Thread-safe: the lock is held for set operations alone, so a reader waits for a few at most. Cost: 0.1 µs a key.
    While ``complete`` is true, a key that is not in the set is not in the tier, if this process alone changes it. A key
    refused for lack of room makes the set incomplete for good.
    """

    def __init__(self, limit: int, *, complete: bool) -> None:
        self._lock = threading.Lock()
        self._keys: set[OffloadKey] = set()
        self._events = EventLog()
        self._limit = limit
        self._complete = complete

    @property
    def complete(self) -> bool:
        """Whether absence from the set means absence from the tier."""
        with self._lock:
            return self._complete

    def contains_many(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """One bool a key, in order, from one state of the set."""
        with self._lock:
            return [key in self._keys for key in keys]

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Add keys as long as there is room."""
        each = dict.fromkeys(keys)  # a tier's own iterator may be behind it, which is to run outside the lock
        with self._lock:
            fresh = [key for key in each if key not in self._keys]
            room = self._limit - len(self._keys)
            self._keys.update(fresh[:room])
            self._complete = self._complete and len(fresh) <= room
            self._events.record("stored", fresh)

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Remove keys."""
        with self._lock:
            found = [key for key in keys if key in self._keys]
            self._keys.difference_update(found)
            self._events.record("removed", found)

    def take_events(self) -> list[TierEvent]:
        """Changes since the last call (``EventLog``). Cost of the first: O(keys) under the lock."""
        with self._lock:
            return self._events.take(lambda: list(self._keys))


class ReportedContents:
    """The keys of one tier, at most *limit*. From any thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # guards all below
        self._keys = PresenceSet(limit, complete=True)
        self._arriving: set[OffloadKey] = set()
        """Keys of stores under way that were not said to be gone again meanwhile."""
        self._loading: dict[int, set[OffloadKey]] = {}
        """Keys of loads under way, by job, that were not said to be there meanwhile: the answer may be older."""

    @property
    def keys(self) -> PresenceSet:
        """The keys that the tier holds."""
        with self._lock:
            return self._keys

    def clear(self) -> None:
        """The tier begins its report again."""
        with self._lock:
            self._keys = PresenceSet(self._limit, complete=True)
            self._arriving.clear()
            self._loading.clear()

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """The tier says that it holds these. Raises ``TypeError`` for what are no keys."""
        plain = plain_keys("keys", keys)
        with self._lock:
            self._keys.add(plain)
            for keys_of_job in self._loading.values():
                keys_of_job.difference_update(plain)

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
        elif kind is JobKind.TIER_LOAD:
            with self._lock:
                self._loading[job.id] = set(job.keys)

    def end(self, kind: JobKind, job: TierJob, result: JobResult) -> None:
        """The tier has answered a job."""
        lost = {*result.missing, *result.failed}
        if kind is JobKind.TIER_STORE:
            if result.error is not None and not lost:
                lost.update(job.keys)
            with self._lock:
                self._keys.add([key for key in job.keys if key in self._arriving and key not in lost])
                self._arriving.difference_update(job.keys)
        elif kind is JobKind.TIER_LOAD:
            with self._lock:
                asked = self._loading.pop(job.id, set())
                self._keys.discard([key for key in result.missing if key in asked])
