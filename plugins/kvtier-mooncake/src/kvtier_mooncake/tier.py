"""The hooks: they accept jobs, hand them to the tier's own threads, and hand out results. None of them does I/O.

The pool is registered once, when the tier opens. Threads then call Mooncake's client with addresses of rows, a part of
a job at a time. All state is guarded by one condition; calls are made outside it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvtier_core import KvtierError
from kvtier_core.tier import JobResult, OffloadKey, PoolView, TierContext, TierInfo, TierJob, hookimpl
from kvtier_mooncake.client import NOT_OURS, Client, Segment
from kvtier_mooncake.connection import Connection
from kvtier_mooncake.memory import Memory, PoolMemory, StagingMemory
from kvtier_mooncake.settings import MooncakeSettings
from kvtier_mooncake.work import Doubts, Kind, Outcome, Work, WorkQueue, name_of

_PART_BYTES = 16 << 20
"""Moved by one call, one block at least: what is more urgent waits for one call."""
_PART_KEYS = 1024
"""Asked about in one call."""
_MAX_DOUBTS = 100_000
"""Blocks remembered that gave wrong bytes: some 10 MiB."""

Move = Callable[[Client, Sequence[str], Sequence[int], int], list[Outcome]]


class MooncakeTier:
    """A tier on the hook specs. The store bounds itself, and other processes use it."""

    Settings = MooncakeSettings
    info = TierInfo(medium="memory", shared=True, bounded_by="storage")

    def __init__(self, settings: MooncakeSettings, context: TierContext) -> None:
        """Keep both; no I/O and no threads yet."""
        self._settings = settings
        self._context = context
        self._blocks_a_part = max(1, _PART_BYTES // context.row_bytes)
        self._memory: Memory | None = None
        self._segment: Segment | None = None
        self._connection = Connection(self._connect)
        self._changed = threading.Condition()  # guards all below
        self._namespace = context.namespace
        self._queue = WorkQueue()
        self._unanswered: dict[int, Work] = {}
        self._results: list[JobResult] = []
        self._doubts = Doubts(_MAX_DOUBTS)
        self._is_open = False
        """From ``on_open`` until the last thread has closed the client."""
        self._num_threads = 0
        self._is_given_up = False
        """Whether opening failed, so that the threads it began are to end."""
        self._is_shut_down = False
        self._has_told_full = False

    def _connect(self) -> Client:
        assert self._memory is not None, "connected before it was opened"
        return Client(self._settings, self._context.name, self._memory.region)

    # Jobs.

    @hookimpl
    def lookup(self, job: TierJob) -> Sequence[bool] | None:
        """Ask the master; the answer comes as ``JobResult.present``."""
        self._accept(Kind.LOOKUP, job)
        return None

    @hookimpl
    def submit_load(self, job: TierJob) -> None:
        """Queue a load, ahead of every store."""
        self._accept(Kind.LOAD, job)

    @hookimpl
    def submit_store(self, job: TierJob) -> None:
        """Queue a store."""
        self._accept(Kind.STORE, job)

    @hookimpl
    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Hand out each result once."""
        with self._changed:
            results, self._results = self._results, []
            return results

    @hookimpl
    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks are not there for this process until it stores them again, which replaces them for all."""
        with self._changed:
            self._doubts.add(name_of(self._namespace, key) for key in keys)

    @hookimpl
    def cancel_jobs(self, job_ids: Sequence[int]) -> None:
        """Begin nothing more of these jobs."""
        with self._changed:
            self._give_up([self._unanswered[n] for n in job_ids if n in self._unanswered], "it was cancelled")

    @hookimpl
    def drain_jobs(self, timeout_s: float) -> Sequence[int]:
        """Wait for loads and stores; the ids of those that may still touch their buffers."""
        with self._changed:
            self._changed.wait_for(lambda: not self._with_buffers(), timeout_s)
            return self._with_buffers()

    # Life.

    @hookimpl
    def on_open(self, pool: PoolView | None) -> None:
        """Connect, register the pool and start the threads. Raises ``TierOpenError``."""
        threads = self._settings.threads
        if pool is not None:
            self._memory = PoolMemory(pool)
        else:
            self._memory = StagingMemory(self._context.row_bytes, self._blocks_a_part, threads)
        with self._changed:
            self._is_open, self._is_given_up, self._num_threads = True, False, threads
        begun = 0
        try:
            if self._settings.global_segment_size:
                self._segment = Segment(self._settings, self._context.name)
            self._connection.open()
            for number in range(threads):
                # Daemons: a call that hangs must not keep the process from ending.
                name = f"kvtier-{self._context.name}-{number}"
                thread = threading.Thread(
                    target=self._serve, args=(number, self._memory), name=name, daemon=True
                )
                thread.start()
                begun += 1
        except BaseException:
            self._give_up_opening(threads - begun)
            raise

    @hookimpl
    def reset(self, namespace: str, description: Mapping[str, Any]) -> None:  # noqa: ARG002 - nothing to write it to
        """Go on under other names. What is under way keeps the old ones."""
        with self._changed:
            self._namespace = namespace
            self._give_up(list(self._unanswered.values()), "the cache was reset")

    @hookimpl
    def shutdown(self, timeout_s: float) -> None:
        """Give up what has not begun, wait for what has, close the client. Raises ``TimeoutError``."""
        with self._changed:
            self._is_shut_down = True
            self._give_up(list(self._unanswered.values()), "the tier was shut down")
            if not self._changed.wait_for(lambda: not self._is_open, timeout_s):
                raise TimeoutError(
                    f"tier {self._context.name!r} (kvtier-mooncake): a call of Mooncake's client has not returned "
                    f"after {timeout_s:g} s: see whether the master and the store's other processes still run"
                )

    def _give_up_opening(self, missing: int) -> None:
        """End the threads that have begun, and close what is open: the next try begins anew."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()
        self._leave(missing)
        with self._changed:
            self._changed.wait_for(lambda: not self._is_open)

    # Under the condition.

    def _accept(self, kind: Kind, job: TierJob) -> None:
        with self._changed:
            work = Work(kind, job, self._namespace)
            self._unanswered[job.id] = work
            self._queue.put(work)
            if self._is_shut_down or work.is_over:
                self._give_up([work], "the tier was shut down")
            self._changed.notify_all()

    def _give_up(self, works: Iterable[Work], reason: str) -> None:
        for work in works:
            work.give_up(reason)
            self._answer(work)
        self._changed.notify_all()

    def _answer(self, work: Work) -> None:
        """Hand out the result of *work*, if it is over."""
        if work.is_over:
            del self._unanswered[work.job.id]
            self._results.append(work.result())
            self._context.wake()

    def _with_buffers(self) -> list[int]:
        return [job_id for job_id, work in self._unanswered.items() if work.kind is not Kind.LOOKUP]

    # On the tier's own threads.

    def _serve(self, thread: int, memory: Memory) -> None:
        while (taken := self._next_part()) is not None:
            work, part = taken
            outcomes = self._do(thread, memory, work, part)
            if work.kind is Kind.LOAD and work.job.arrived is not None and len(part) < len(work.job.keys):
                work.job.arrived([at for at, outcome in zip(part, outcomes, strict=True) if outcome is True])
            with self._changed:
                work.end(part, outcomes)
                self._answer(work)
                self._changed.notify_all()
        self._leave(1)

    def _next_part(self) -> tuple[Work, range] | None:
        with self._changed:
            while True:
                self._changed.wait_for(
                    lambda: self._queue.first() is not None or self._is_shut_down or self._is_given_up
                )
                work = self._queue.first()
                if work is None:
                    return None
                if work.job.deadline <= time.monotonic():
                    self._give_up([work], "its deadline passed")
                    continue
                is_lookup = work.kind is Kind.LOOKUP
                return work, work.take(_PART_KEYS if is_lookup else self._blocks_a_part)

    def _leave(self, threads: int) -> None:
        """So many threads end, or could not begin; the last one closes the clients."""
        with self._changed:
            self._num_threads -= threads
            if self._num_threads:
                return
        self._connection.close()
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def _do(self, thread: int, memory: Memory, work: Work, part: range) -> Sequence[Outcome]:
        """Do *part* of *work*. Whatever that raises fails the part, and never the thread."""
        try:
            match work.kind:
                case Kind.LOOKUP:
                    return self._ask(work, part)
                case Kind.LOAD:
                    return self._load(thread, memory, work, part)
                case Kind.STORE:
                    return self._store(thread, memory, work, part)
        except Exception as error:  # noqa: BLE001 - a client may raise anything, and the job's result is due
            return [
                str(error) if isinstance(error, KvtierError) else f"{type(error).__name__}: {error}"
            ] * len(part)

    def _ask(self, work: Work, part: range) -> list[Outcome]:
        names = work.names(part)
        with self._connection.lend() as client:
            answers = client.exist(names)
        with self._changed:
            return [name not in self._doubts and answer for name, answer in zip(names, answers, strict=True)]

    def _load(self, thread: int, memory: Memory, work: Work, part: range) -> list[Outcome]:
        names, addresses = work.names(part), memory.addresses(thread, work.job, part)
        sound, _ = self._sort(names)
        outcomes: list[Outcome] = [False] * len(part)
        for at, outcome in self._call(Client.get, names, addresses, sound):
            if outcome is True:
                memory.empty(thread, work.job, part[at], at)
            elif outcome == NOT_OURS:
                with self._changed:
                    self._doubts.add([names[at]])
            outcomes[at] = outcome != NOT_OURS and outcome
        return outcomes

    def _store(self, thread: int, memory: Memory, work: Work, part: range) -> list[Outcome]:
        names, addresses = work.names(part), memory.addresses(thread, work.job, part)
        memory.fill(thread, work.job, part)
        sound, doubted = self._sort(names)
        outcomes: list[Outcome] = [False] * len(part)
        for at, outcome in self._call(Client.put, names, addresses, sound):
            outcomes[at] = outcome
        for at, outcome in self._call(Client.replace, names, addresses, doubted):
            outcomes[at] = outcome
        with self._changed:
            self._doubts.replaced(names[at] for at in doubted if outcomes[at] is True)
        if False in outcomes:
            self._tell_full(outcomes.count(False))
        return outcomes

    def _sort(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """Where the blocks are that can be believed, and those that gave wrong bytes."""
        with self._changed:
            sound = [name not in self._doubts for name in names]
        places = range(len(names))
        return [at for at in places if sound[at]], [at for at in places if not sound[at]]

    def _call(
        self, move: Move, names: Sequence[str], addresses: Sequence[int], chosen: Sequence[int]
    ) -> list[tuple[int, Outcome]]:
        """Move the blocks that are *chosen*, by their places, and say how each ended.

        One call has no name twice: of two buffers Mooncake would fill one, and say that it has filled both.
        """
        ended: list[tuple[int, Outcome]] = []
        while chosen:
            once = sorted({names[at]: at for at in chosen}.values())
            with self._connection.lend() as client:
                outcomes = move(
                    client,
                    [names[at] for at in once],
                    [addresses[at] for at in once],
                    self._context.row_bytes,
                )
            ended += zip(once, outcomes, strict=True)
            chosen = sorted(set(chosen).difference(once))
        return ended

    def _tell_full(self, declined: int) -> None:
        if not self._has_told_full:
            self._has_told_full = True
            self._context.log.warning(
                "tier %r (kvtier-mooncake): the store had no room for %d blocks. It makes room by itself; where it "
                "never does, no process gives it memory: start one, or set global_segment_size. This is told once",
                self._context.name,
                declined,
            )
