"""The hooks: they accept jobs, hand them to the tier's own threads and hand out results. None of them does I/O.

What a hook owes the core, and how it is met here:

- It returns at once: the instance's other hooks wait while it runs. So hooks touch a queue and nothing else.
- Each job has one result, whatever becomes of it: finished, failed, cancelled, or never begun.
- A job's buffers are the pool's memory. They are touched only between the submit and the result.
- It says what it holds (``reports_contents``): the bucket is empty when ``on_open`` or ``reset`` returns, the core adds
  what it stores, and the tier reports what leaves. So it is asked about no key that it lacks.
- After ``reset`` nothing submitted before may show: a job keeps the bucket it was submitted under.
- After ``shutdown`` nothing may touch the pool; ``drain_jobs`` tells the truth about what still might.

All state is guarded by one condition; I/O happens outside it.
"""

import heapq
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from kvtier_core.tier import (
    Duration,
    JobResult,
    OffloadKey,
    PoolView,
    TierContext,
    TierInfo,
    TierJob,
    TierSettings,
    hookimpl,
)
from kvtier_example_async.bucket import Bucket
from kvtier_example_async.work import Kind, Work


class AsyncSettings(TierSettings):
    """``[tiers.NAME]`` with ``type = "async_example"``."""

    latency: Duration = 0.0
    """Seconds that the storage takes for each block."""


class AsyncTier:
    """A tier on the hook specs; it bounds itself. As many jobs run at a time as ``threads`` says."""

    Settings = AsyncSettings
    info = TierInfo(medium="memory", bounded_by="tier", default_capacity=1 << 30, reports_contents=True)

    def __init__(self, settings: AsyncSettings, context: TierContext) -> None:
        """Keep both; no I/O and no threads yet."""
        self._settings = settings
        self._context = context
        self._bucket = self._make_bucket()
        self._changed = threading.Condition()  # guards all below
        self._order = count()
        self._waiting: list[tuple[Kind, int, Work]] = []  # a heap; loads leave it before stores
        self._unanswered: dict[int, Work] = {}  # accepted and without a result; waiting ones are among them
        self._results: list[JobResult] = []
        self._is_shut_down = False

    # Jobs.

    @hookimpl
    def lookup(self, job: TierJob) -> Sequence[bool] | None:
        """Ask the storage; the answer comes as ``JobResult.present``."""
        self._accept(Kind.LOOKUP, job)
        return None

    @hookimpl
    def submit_store(self, job: TierJob) -> None:
        """Queue a store."""
        self._accept(Kind.STORE, job)

    @hookimpl
    def submit_load(self, job: TierJob) -> None:
        """Queue a load, ahead of every store."""
        self._accept(Kind.LOAD, job)

    @hookimpl
    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Hand out each result once."""
        with self._changed:
            results, self._results = self._results, []
            return results

    @hookimpl
    def cancel_jobs(self, job_ids: Sequence[int]) -> None:
        """Fail the jobs that no thread has begun; the others stop at their next block."""
        with self._changed:
            works = [self._unanswered[job_id] for job_id in job_ids if job_id in self._unanswered]
        self._give_up(works, "cancelled")

    @hookimpl
    def drain_jobs(self, timeout_s: float) -> Sequence[int]:
        """Wait for loads and stores; the ids of those that may still touch their buffers."""
        with self._changed:
            self._changed.wait_for(lambda: not self._with_buffers(), timeout_s)
            return self._with_buffers()

    @hookimpl
    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks that gave wrong bytes. This bucket does so at once; a real service would be asked later."""
        for key in keys:
            self._bucket.remove(key)

    # Life.

    @hookimpl
    def on_open(self, pool: PoolView | None) -> None:  # noqa: ARG002 - for tiers that register memory
        """Start the threads. A tier that can't reach its storage raises ``TierOpenError`` here."""
        for number in range(self._settings.threads):
            # Daemons: a call that hangs must not keep the process from ending.
            name = f"{self._context.name}-{number}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    @hookimpl
    def reset(self, namespace: str, description: Mapping[str, Any]) -> None:  # noqa: ARG002 - nothing to write it to
        """Go on with an empty bucket; jobs on the old one are given up, and whatever they still do stays there."""
        with self._changed:
            works = list(self._unanswered.values())
            # A real service would be asked for another prefix here, made of *namespace*.
            self._bucket = self._make_bucket()
        self._give_up(works, "the cache was reset")

    @hookimpl
    def shutdown(self, timeout_s: float) -> None:
        """Give up what has not begun, wait for what has, end the threads. What hangs is named by ``drain_jobs``."""
        with self._changed:
            self._is_shut_down = True
            works = list(self._unanswered.values())
            self._changed.notify_all()  # threads that wait for work end
        self._give_up(works, "the tier was shut down")
        self.drain_jobs(timeout_s)

    def _make_bucket(self) -> Bucket:
        return Bucket(self._context.capacity_bytes, latency=self._settings.latency)

    # The queue.

    def _accept(self, kind: Kind, job: TierJob) -> None:
        with self._changed:
            work = Work(kind, job, self._bucket, partial(self._report_left, self._bucket))
            self._unanswered[job.id] = work
            if not self._is_shut_down:
                heapq.heappush(self._waiting, (kind, next(self._order), work))
                self._changed.notify_all()
                return
        self._answer([work.fail("the tier was shut down")])

    def _report_left(self, bucket: Bucket, keys: Sequence[OffloadKey]) -> None:
        with self._changed:
            if bucket is self._bucket:  # what leaves the bucket of an earlier namespace is of no interest
                self._context.report_evicted(keys)

    def _give_up(self, works: Sequence[Work], reason: str) -> None:
        """Answer the works that wait in the queue now; the others see that they are cancelled."""
        with self._changed:
            for work in works:
                work.is_cancelled = True
            dropped = [entry for entry in self._waiting if entry[2].is_cancelled]
            self._waiting = [entry for entry in self._waiting if not entry[2].is_cancelled]
            heapq.heapify(self._waiting)
        self._answer([work.fail(reason) for _, _, work in dropped])

    def _answer(self, results: Sequence[JobResult]) -> None:
        with self._changed:
            for result in results:
                del self._unanswered[result.job_id]
            self._results += results
            self._changed.notify_all()
        self._context.wake()  # outside the lock: the core may look at once

    def _with_buffers(self) -> list[int]:
        return [job_id for job_id, work in self._unanswered.items() if work.kind is not Kind.LOOKUP]

    # On the tier's own threads.

    def _serve(self) -> None:
        while (work := self._next_work()) is not None:
            self._answer([work.run()])

    def _next_work(self) -> Work | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_shut_down)
            return heapq.heappop(self._waiting)[2] if self._waiting else None
