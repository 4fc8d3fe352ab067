"""What all devices share: the numbers, results and control words of their jobs, and a lane for each direction.

A lane is a thread that waits for the direction's jobs in order, tells the control page, and gives each job one result:
done, failed or dropped. On a CPU it copies. Where copies are queued on a stream it sleeps until they are over. Somebody
has to: while an engine waits in a reset, its threads ask for no results, and the control page must move (C36.3).
"""

import logging
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier_core.transfer.device import TransferResult
from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.layout import PROOF_BYTES, KVLayout
from kvtier_core.transfer.plan import GroupTransfer, Runs, TransferLimits, plan_transfer
from kvtier_core.transfer.pool import Pool
from kvtier_core.transfer.waiting import bounded

_log = logging.getLogger("kvtier.transfer")


class Outcome(NamedTuple):
    """What came of one job's copies. See ``TransferResult``."""

    bytes: int = 0
    seconds: float = 0.0
    error: str | None = None
    dropped: bool = False


class Copies(NamedTuple):
    """One job's copies, once they have begun."""

    end: Callable[[], Outcome]
    """Returns when none of their bytes moves any more. Copies that are over may be ended by several threads."""
    is_over: Callable[[], bool] = bool
    """Whether ``end`` would not wait. Never waits itself. The default says no."""


class _Job(NamedTuple):
    job_id: int
    copies: Copies


def _is_over(job: _Job) -> bool:
    try:
        return job.copies.is_over()
    except Exception:  # noqa: BLE001 - ``end`` raises it as well, for the job's result
        return True


class LaneDevice(ABC):
    """Implements ``Device`` but for the copies.

    *worker* fills its own part of each row: the ``worker``-th stretch of ``payload_bytes`` of the row's group.
    ``on_finished`` is called on a lane when there were new results; it should only wake somebody. Methods may be called
    from any thread. ``shutdown`` must come before the pool's ``close``.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: Pool,
        worker: int = 0,
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        """A subclass is ready, with its ``worker_parts``, before it calls this.

        Raises ``ValueError``: the workers' parts and the proof do not fit a row, the pool has no such worker, or
        *worker* has a device in this process already. ``RuntimeError`` where no more threads can be had.
        """
        self._layout = layout
        self._addresses = [group.read_addresses() for group in layout.groups]
        self._limits = TransferLimits(
            num_blocks=tuple(group.num_blocks for group in layout.groups),
            num_rows=pool.geometry.num_rows,
            factor=layout.block_size_factor,
        )
        self._control, self._worker, self._on_finished = pool.control, worker, on_finished
        self._control.take_worker(worker)
        self._beginning = threading.Lock()  # copies begin in the order of their jobs
        self._lock = threading.Lock()  # guards the five below
        self._changed = {direction: threading.Condition(self._lock) for direction in Direction}
        self._under_way: dict[Direction, deque[_Job]] = {direction: deque() for direction in Direction}
        self._unfinished: dict[Direction, set[int]] = {direction: set() for direction in Direction}
        self._results: list[TransferResult] = []
        self._is_stopping = False
        self._has_let_go = False
        self._threads = [
            threading.Thread(
                target=self._run, args=(direction,), name=f"kvtier-{direction.value}-{worker}", daemon=True
            )
            for direction in Direction
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._stop()
            self._control.leave_worker(worker)
            self._let_go()
            raise

    @abstractmethod
    def _begin(self, direction: Direction, parts: Sequence[GroupTransfer]) -> Copies:
        """Begin to copy, on the caller's thread: *parts* may be the caller's again after. Raises if nothing began."""

    @abstractmethod
    def _let_go(self) -> None:
        """No copy will follow: drop what holds the pool's mapping. Called once, also where a thread can't be had."""

    def _enter_lane(self) -> None:
        """The first call of each lane's thread."""
        return

    def submit(self, direction: Direction, job_id: int, parts: Sequence[GroupTransfer]) -> None:
        """See ``Device``."""
        with self._beginning:
            with self._lock:
                if self._is_stopping:
                    raise RuntimeError(f"{direction.value} job {job_id} was submitted after shutdown")
                self._control.announce(self._worker, direction, job_id)
                self._unfinished[direction].add(job_id)
            try:
                copies = self._begin(direction, parts)
            except Exception as error:  # noqa: BLE001 - the job's result says it
                copies = Copies(partial(Outcome, error=describe(error)))
            with self._lock:
                self._under_way[direction].append(_Job(job_id, copies))
                self._changed[direction].notify_all()

    def get_finished(self) -> list[TransferResult]:
        """See ``Device``. Copies that are over need no lane to say so: it may be waiting for the interpreter."""
        for direction, jobs in self._under_way.items():
            with self._lock:
                under_way = tuple(jobs)
            for job in takewhile(_is_over, under_way):
                self._end(direction, job)
        with self._lock:
            results, self._results = self._results, []
            return results

    def wait(self, direction: Direction, job_ids: Iterable[int], timeout_s: float) -> bool:
        """See ``Device``."""
        wanted = frozenset(job_ids)
        with self._lock:
            unfinished = self._unfinished[direction]
            return self._changed[direction].wait_for(
                lambda: unfinished.isdisjoint(wanted), bounded(timeout_s)
            )

    def shutdown(self, timeout_s: float) -> bool:
        """See ``Device``. After False a thread may still copy: the pool stays mapped."""
        deadline = time.monotonic() + bounded(timeout_s)
        self._stop()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        with self._lock:  # threads that shut down at once
            if not self._has_let_go:
                self._let_go()
                self._control.leave_worker(self._worker)
                self._has_let_go = True
        return True

    def _stop(self) -> None:
        """Take no more jobs."""
        with self._lock:
            self._is_stopping = True
            for changed in self._changed.values():
                changed.notify_all()

    def _run(self, direction: Direction) -> None:
        """A lane's thread."""
        try:
            self._enter_lane()
        except BaseException:  # noqa: BLE001 - the copies then say themselves what they lack
            _log.exception("the %s lane could not set up its thread", direction.value)
        while (job := self._next(direction)) is not None:
            self._end(direction, job)
            del job  # and with it what it holds, until the next one comes
            if self._on_finished is not None:
                try:
                    self._on_finished()
                except BaseException:  # noqa: BLE001 - the caller's fault costs a log line, not the lane
                    _log.exception("on_finished raised; the %s lane goes on", direction.value)

    def _next(self, direction: Direction) -> _Job | None:
        """Wait for a job; ``None`` when none will follow."""
        jobs, unfinished = self._under_way[direction], self._unfinished[direction]
        with self._lock:
            self._changed[direction].wait_for(lambda: jobs or (self._is_stopping and not unfinished))
            return jobs[0] if jobs else None

    def _end(self, direction: Direction, job: _Job) -> None:
        """Wait for the first job's copies and give it its result, unless another thread has."""
        try:
            outcome = job.copies.end()
        except BaseException as error:  # noqa: BLE001 - the job gets its result, the lane lives on
            outcome = Outcome(error=describe(error))
        ok = outcome.error is None and not outcome.dropped
        result = TransferResult(job_id=job.job_id, direction=direction, ok=ok, **outcome._asdict())
        with self._lock:
            jobs = self._under_way[direction]
            if not jobs or jobs[0] is not job:
                return
            try:
                self._control.finish(self._worker, direction, job.job_id)
            except ValueError as error:  # the pool was closed meanwhile
                result = replace(result, ok=False, error=describe(error))
            jobs.popleft()
            self._results.append(result)
            self._unfinished[direction].discard(job.job_id)
            self._changed[direction].notify_all()

    def _plan(self, direction: Direction, parts: Sequence[GroupTransfer]) -> dict[int, Runs]:
        plan = plan_transfer(direction, parts, self._limits)
        for group in plan:
            # The copies go by addresses: what is there now may be anybody's.
            if self._layout.groups[group].read_addresses() != self._addresses[group]:
                raise RuntimeError(
                    f"tensors of KV group {group} have been given other memory since the device was opened: open "
                    "another device for them"
                )
        return plan

    def _bytes(self, plan: dict[int, Runs]) -> int:
        return sum(
            self._layout.groups[group].block_bytes * int(runs[3].sum()) for group, runs in plan.items()
        )


def describe(error: BaseException) -> str:
    """What a result says of it."""
    return "".join(traceback.format_exception_only(error)).strip()


def worker_parts(layout: KVLayout, pool: Pool, worker: int) -> list[npt.NDArray[np.uint8]]:
    """This worker's bytes of every row, an array for each group. Raises ``ValueError`` as the devices' constructors.

    ``(num_rows, factor, slot_bytes)``, or ``(num_rows, slot_bytes)`` where the factor is 1.
    """
    num_workers, row_bytes = pool.geometry.num_workers, pool.geometry.row_bytes
    if not 0 <= worker < num_workers:
        raise ValueError(f"worker {worker} is not one of this pool's {num_workers}")
    factor = layout.block_size_factor
    parts = []
    for group, payload_bytes in enumerate(layout.payload_bytes):
        begin = layout.row_offset(group, worker)
        end = begin + payload_bytes if layout.row_offsets else num_workers * payload_bytes
        if (needed := end + PROOF_BYTES) > row_bytes:
            raise ValueError(
                f"{num_workers} worker(s), this one with {payload_bytes} bytes a block of group {group} from byte "
                f"{begin} on, and {PROOF_BYTES} bytes of proof, need rows of {needed} bytes, and the pool's have "
                f"{row_bytes}"
            )
        rows = pool.rows_array[:, begin : begin + payload_bytes]
        parts.append(rows if factor == 1 else rows.reshape(len(rows), factor, payload_bytes // factor))
    return parts
