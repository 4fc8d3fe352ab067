"""On the hook specs: blocks in memory, moved by threads of the tier's own, with every hook."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

from kvtier_core.tier import (
    Entry,
    EvictionPolicy,
    JobResult,
    OffloadKey,
    OffloadPolicy,
    PoolView,
    RequestInfo,
    TierContext,
    TierInfo,
    TierJob,
    TierSettings,
    begin_of,
    hookimpl,
    make_policy,
)


class JobsSettings(TierSettings):
    pause: float = 0.0


class JobsTier:
    Settings = JobsSettings
    info = TierInfo(
        medium="memory", bounded_by="tier", ttl_by="tier", default_capacity=1 << 30, reports_contents=True
    )

    def __init__(self, settings: JobsSettings, context: TierContext) -> None:
        self.settings = settings
        self.context = context
        self.lock = threading.RLock()
        self.blocks: dict[OffloadKey, tuple[float, bytes]] = {}
        self.entries: dict[OffloadKey, Entry] = {}
        self.policy = self.new_policy()
        self.results: SimpleQueue[JobResult] = SimpleQueue()
        self.changed = threading.Condition()
        self.running: set[int] = set()
        self.threads: ThreadPoolExecutor | None = None
        self.epoch = 0

    def new_policy(self) -> EvictionPolicy[Entry]:
        capacity = self.context.capacity_bytes
        most = 1 << 20 if capacity is None else max(1, capacity // self.context.row_bytes)
        policy: EvictionPolicy[Entry] = make_policy(self.settings.policy, most, self.context.policies)
        return policy

    # Hooks.

    @hookimpl
    def on_open(self, pool: PoolView | None) -> None:
        self.threads = ThreadPoolExecutor(self.settings.threads)

    @hookimpl
    def on_new_request(self, request: RequestInfo) -> OffloadPolicy | None:
        assert begin_of(request.chain, time.time()) <= time.time()
        return OffloadPolicy.BLOCK_LEVEL

    @hookimpl
    def on_request_finished(self, request: RequestInfo) -> None:
        assert isinstance(request.request_id, str)

    @hookimpl
    def on_schedule_end(self, step: int) -> None:
        assert step >= 0

    @hookimpl
    def lookup(self, job: TierJob) -> Sequence[bool | None] | None:
        with self.lock:
            return [self.is_there(key) for key in job.keys]

    @hookimpl
    def submit_store(self, job: TierJob) -> None:
        self.start(self.store, job)

    @hookimpl
    def submit_load(self, job: TierJob) -> None:
        self.start(self.load, job)

    @hookimpl
    def get_finished_jobs(self) -> Sequence[JobResult]:
        return [self.results.get() for _ in range(self.results.qsize())]

    @hookimpl
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        with self.lock:
            for key in keys:
                self.use(key)

    @hookimpl
    def discard(self, keys: Sequence[OffloadKey]) -> None:
        with self.lock:
            self.drop([key for key in keys if key in self.blocks])

    @hookimpl
    def cancel_jobs(self, job_ids: Sequence[int]) -> None:
        assert all(isinstance(job_id, int) for job_id in job_ids)

    @hookimpl
    def drain_jobs(self, timeout_s: float) -> Sequence[int]:
        with self.changed:
            self.changed.wait_for(lambda: not self.running, timeout_s)
            return sorted(self.running)

    @hookimpl
    def reset(self, namespace: str, description: Mapping[str, Any]) -> None:
        with self.lock:
            self.epoch += 1
            self.blocks.clear()
            self.entries.clear()
            self.policy = self.new_policy()

    @hookimpl
    def shutdown(self, timeout_s: float) -> None:
        if self.threads is not None:
            self.threads.shutdown(wait=False, cancel_futures=True)
            self.drain_jobs(timeout_s)

    # Blocks, under the lock.

    def is_there(self, key: OffloadKey) -> bool:
        found = self.blocks.get(key)
        ttl = self.settings.ttl
        return found is not None and (ttl is None or time.monotonic() < found[0] + ttl)

    def use(self, key: OffloadKey) -> None:
        if key in self.entries:
            self.entries[key].uses += 1
            self.policy.release([self.entries[key]])

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            del self.blocks[key]
            self.policy.remove([self.entries.pop(key)])
        self.context.report_evicted(keys)

    def most(self) -> int:
        capacity = self.context.capacity_bytes
        return 1 << 30 if capacity is None else capacity // self.context.row_bytes

    def put(self, key: OffloadKey, block: bytes, chain: int, depth: int) -> None:
        if key in self.blocks:
            self.policy.remove([self.entries.pop(key)])
            del self.blocks[key]
        while self.blocks and len(self.blocks) >= self.most():
            (victim,) = self.policy.evict(1, frozenset())
            del self.blocks[victim.key], self.entries[victim.key]
            self.context.report_evicted([victim.key])
        entry = Entry.of(key)
        entry.chain, entry.depth = chain, depth
        self.blocks[key], self.entries[key] = (time.monotonic(), block), entry
        self.policy.insert([entry])

    # Jobs, on the tier's threads.

    def start(self, work: Callable[[TierJob, int], JobResult], job: TierJob) -> None:
        assert self.threads is not None, "not open"
        with self.changed:
            self.running.add(job.id)
        try:
            future = self.threads.submit(work, job, self.epoch)
        except RuntimeError as error:
            self.answer(JobResult(job_id=job.id, failed=job.keys, error=str(error)))
        else:
            future.add_done_callback(partial(self.end, job))

    def end(self, job: TierJob, future: "Future[JobResult]") -> None:
        try:
            self.answer(future.result())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self.answer(JobResult(job_id=job.id, failed=job.keys, error=text))

    def answer(self, result: JobResult) -> None:
        self.results.put(result)
        with self.changed:
            self.running.discard(result.job_id)
            self.changed.notify_all()
        self.context.wake()

    def store(self, job: TierJob, epoch: int) -> JobResult:
        time.sleep(self.settings.pause)
        chain = 0 if job.request is None else job.request.chain
        with self.lock:
            if epoch == self.epoch:
                for depth, (key, block) in enumerate(zip(job.keys, job.buffers, strict=True)):
                    self.put(key, bytes(block), chain, depth)
        return JobResult(job_id=job.id)

    def load(self, job: TierJob, epoch: int) -> JobResult:
        missing = []
        for number, (key, into) in enumerate(zip(job.keys, job.buffers, strict=True)):
            with self.lock:
                if epoch != self.epoch or not self.is_there(key):
                    missing.append(key)
                    continue
                self.use(key)
                into[:] = self.blocks[key][1]
            if job.arrived is not None:
                job.arrived([number])
        return JobResult(job_id=job.id, missing=missing)
