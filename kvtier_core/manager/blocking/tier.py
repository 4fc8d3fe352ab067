"""``BlockingTier``: the port of a ``BlockTier`` (C52). Jobs go straight into its work queue, and I/O threads do them.

The *life thread* does what may wait or call the tier outside of jobs: opening, resets, shutdown, uses, and deadlines
and ages when one is due. Nothing is reported to a blocking tier about requests.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvtier_core.blocktier import BlockTier
from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.errors import KvtierError, TierOpenError
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking.instance import TierInstance
from kvtier_core.manager.blocking.jobs import JobBoard
from kvtier_core.manager.blocking.work import Kind
from kvtier_core.manager.guard import describe
from kvtier_core.manager.inbox import MAX_WAITING, CallQueue
from kvtier_core.manager.port import TierHome, TierPort
from kvtier_core.manager.presence import PresenceSet
from kvtier_core.tier_settings import TierSettings
from kvtier_core.transfer.waiting import bounded
from kvtier_core.values import JobResult, TierEvent, TierJob

_MAX_RETIRED = 4
"""Earlier instances (one a reset) that may still have calls running: each keeps its threads."""
_KINDS = {JobKind.LOOKUP: Kind.LOOKUP, JobKind.TIER_LOAD: Kind.LOAD, JobKind.TIER_STORE: Kind.STORE}


class BlockingTier(TierPort):
    """One ``BlockTier`` class with its settings. ``TierPort`` says what its methods do."""

    loads_on_our_threads = True

    def __init__(self, tier_class: type[BlockTier], settings: TierSettings, home: TierHome) -> None:
        super().__init__(home, CallQueue(MAX_WAITING))
        self._tier_class = tier_class
        self._settings = settings
        self._context = home.context
        self._board = JobBoard(self._finish)
        self._retired: list[TierInstance] = []  # of earlier namespaces, with calls still running
        self._lock = threading.Lock()  # guards the three below
        self._current: TierInstance | None = None
        self._why_closed = "not open yet"
        self._looks_at = float("inf")
        """When the life thread looks at deadlines next."""

    # -- for any thread

    def submit(self, kind: JobKind, job: TierJob) -> None:
        """As ``TierPort.submit``. Never waits for I/O."""
        with self._lock:
            instance, reason = self._current, self._why_closed
        if instance is None:
            error = f"tier {self.identity.name!r}: {reason}" if job.keys else None
            self._home.finish(JobResult(job_id=job.id, failed=job.keys, error=error))
            return
        presence = instance.state.presence if kind is JobKind.LOOKUP else None
        if presence is not None:
            self._home.finish(JobResult(job_id=job.id, present=presence.contains_many(job.keys)))
            return
        self._look_by(instance.submit(job, _KINDS[kind]))

    def cancel(self, job_ids: Sequence[int]) -> None:
        """As ``TierPort.cancel``: what has not begun fails."""
        self._calls.put_news(partial(self._do, "cancel", lambda instance: instance.cancel(job_ids)))

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Serve these blocks no more and delete them in an I/O thread. A later store of a key is not deleted."""
        if (instance := self._instance()) is not None:
            instance.state.condemn(keys)

    def touch(self, keys: Sequence[OffloadKey], chain: int) -> None:
        """As ``TierPort.touch``."""
        self._calls.put_news(partial(self._do, "touch", lambda instance: instance.touch(keys, chain)))

    def take_events(self) -> list[TierEvent]:
        """As ``TierPort.take_events``. The first answer, and the first after a reset, starts with ``cleared``."""
        instance = self._instance()
        return [] if instance is None else instance.state.take_events()

    def resident(self) -> PresenceSet | None:
        """The keys that the tier holds, until the next reset; ``None`` where it has to be asked."""
        instance = self._instance()
        return None if instance is None else instance.state.presence

    def tick(self) -> None:
        """Look at deadlines and ages now. The life thread does so by itself."""
        if (instance := self._instance()) is not None:
            instance.tick()

    def _instance(self) -> TierInstance | None:
        with self._lock:
            return self._current

    def _finish(self, kind: Kind, result: JobResult, is_fault: bool) -> None:  # noqa: FBT001 - as ``Finish``
        if is_fault and result.error is not None:
            what = kind.name.lower()
            self._guard.report(what, f"a {what} job failed: {result.error}")
        if kind is Kind.STORE and self._settings.ttl is not None:
            self._look_by(self._home.clock() + self._settings.ttl)
        self._home.finish(result)

    def _look_by(self, due: float) -> None:
        """Have the life thread look at deadlines and ages no later than *due*."""
        with self._lock:
            is_sooner = due < self._looks_at
            if is_sooner:
                self._looks_at = due
        if is_sooner:
            self._calls.wake()

    # -- the life thread

    def _turn(self) -> None:
        if self._looks_at <= self._home.clock():  # what comes in meanwhile is looked at next time
            self.tick()

    def _pause(self) -> float | None:
        with self._lock:
            due = float("inf") if self._retry_at is None else self._retry_at
            if self._current is not None:
                due = min(due, self._current.next_due())
            self._looks_at = due
        return None if due == float("inf") else bounded(max(0.0, due - self._home.clock()))

    def _do(self, what: str, work: Callable[[TierInstance], None]) -> None:
        if (instance := self._instance()) is not None:
            self._guarded(partial(work, instance), what)

    def _go_over(self, namespace: str, description: Mapping[str, Any]) -> None:
        self._context = replace(self._context, namespace=namespace, description=description)
        self._retire_current("the cache was reset")
        self._open()

    def _open(self) -> None:
        name = self._context.name
        try:
            self._check_retired()
            instance = TierInstance(self._tier_class, self._settings, self._context, self._home, self._board)
            instance.open()
        except BaseException as error:
            with self._lock:
                self._why_closed = f"could not be opened: {describe(error)}"
            if isinstance(error, KvtierError) or not isinstance(error, Exception):
                raise
            raw = TierOpenError(f"tier {name!r} could not be opened: {describe(error)}")
            raw.is_explained = False
            raise raw from error
        with self._lock:
            self._current = instance

    def _check_retired(self) -> None:
        self._retired = [instance for instance in self._retired if not instance.wait_closed(0)]
        if len(self._retired) > _MAX_RETIRED:
            raise TierOpenError(
                f"tier {self._context.name!r} is out of use: calls of {len(self._retired)} earlier instances still run "
                f"and at most {_MAX_RETIRED} may; see why its storage hangs"
            )

    def _retire_current(self, reason: str) -> None:
        with self._lock:
            instance, self._current = self._current, None
            self._why_closed = reason
        if instance is not None:
            self._retired.append(instance)
            instance.retire(reason)

    def _close(self, timeout_s: float) -> bool:
        give_up = time.monotonic() + timeout_s
        self._retire_current("the tier was shut down")
        return all(instance.wait_closed(give_up - time.monotonic()) for instance in self._retired)
