"""A device that copies on threads: a lane for each direction. Subclasses say what a copy is.

A lane carries out its jobs in order, tells the control page, and gives each job one result: done, failed or dropped.
The interface of devices knows no lanes: a device that queues its copies on streams needs none.
"""

import logging
import threading
import time
import traceback
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier_core.transfer.control import ControlPage
from kvtier_core.transfer.device import TransferResult
from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.layout import PROOF_BYTES, KVLayout
from kvtier_core.transfer.plan import GroupTransfer, Runs, TransferLimits, copy_parts, plan_transfer
from kvtier_core.transfer.pool import Pool
from kvtier_core.transfer.waiting import bounded

_log = logging.getLogger("kvtier.transfer")


class LaneJob(NamedTuple):
    """One transfer to carry out, after *compute_done* has returned."""

    job_id: int
    parts: Sequence[GroupTransfer]
    compute_done: Callable[[], object] | None


Copy = Callable[[Sequence[GroupTransfer]], int]
"""Carries out a transfer and returns the bytes it moved."""


class Lane:
    """Calls *copy* for one job after the other on a daemon thread, which calls *enter* first."""

    def __init__(
        self,
        direction: Direction,
        control: ControlPage,
        worker: int,
        copy: Copy,
        on_finished: Callable[[], None] | None,
        enter: Callable[[], object] | None,
    ) -> None:
        self._direction = direction
        self._control = control
        self._worker = worker
        self._copy = copy
        self._on_finished = on_finished
        self._enter = enter
        self._changed = threading.Condition()  # guards the five below
        self._queue: deque[LaneJob] = deque()
        self._unfinished: set[int] = set()
        self._results: list[TransferResult] = []
        self._last_id = control.get_last_started(worker, direction)
        self._stopping = False
        control.hand(worker, direction, self._last_id)  # what a dead process had in its line never comes
        self._thread = threading.Thread(
            target=self._run, name=f"kvtier-{direction.value}-{worker}", daemon=True
        )
        self._thread.start()

    def submit(self, job: LaneJob) -> None:
        """Queue a job. Raises ``ValueError`` when its id does not grow, ``RuntimeError`` after ``stop``."""
        with self._changed:
            if self._stopping:
                raise RuntimeError(f"{self._direction.value} job {job.job_id} was submitted after shutdown")
            if job.job_id <= self._last_id:
                raise ValueError(
                    f"{self._direction.value} job {job.job_id} must be above the last one, {self._last_id}"
                )
            self._last_id = job.job_id
            with suppress(ValueError):  # the pool is closed already, which fails the job when it begins
                self._control.hand(self._worker, self._direction, job.job_id)
            self._unfinished.add(job.job_id)
            self._queue.append(job)
            self._changed.notify_all()

    def take_finished(self) -> list[TransferResult]:
        """The results since the last call."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def wait(self, job_ids: Iterable[int], timeout_s: float) -> bool:
        """Block until none of these jobs is unfinished; False on time-out."""
        wanted = frozenset(job_ids)
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished.isdisjoint(wanted), bounded(timeout_s))

    def stop(self) -> None:
        """Take no more jobs; drop those not begun."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after ``stop``; False on time-out."""
        self._thread.join(bounded(timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._enter is not None:
            try:
                self._enter()
            except BaseException:  # noqa: BLE001 - the copies then say themselves what they lack
                _log.exception("the %s lane could not set up its thread", self._direction.value)
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Carry out one job; False when none will follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopping)
            if not self._queue:
                return False
            job = self._queue.popleft()
        result = self._carry_out(job)
        with self._changed:
            self._results.append(result)
            self._unfinished.discard(job.job_id)
            self._changed.notify_all()
        if self._on_finished is not None:
            try:
                self._on_finished()
            except BaseException:  # noqa: BLE001 - the caller's fault costs a log line, not the lane
                _log.exception("on_finished raised; the %s lane goes on", self._direction.value)
        return True

    def _carry_out(self, job: LaneJob) -> TransferResult:
        ended = partial(TransferResult, job_id=job.job_id, direction=self._direction)
        try:
            self._control.begin(self._worker, self._direction, job.job_id)
            try:
                if job.compute_done is not None and not self._stopping:
                    job.compute_done()
                if self._stopping:
                    return ended(ok=False, dropped=True)
                begun = time.perf_counter()
                moved = self._copy(job.parts)
                return ended(ok=True, bytes=moved, seconds=time.perf_counter() - begun)
            finally:
                self._control.finish(self._worker, self._direction, job.job_id)
        except BaseException as error:  # noqa: BLE001 - the job gets its result, the lane lives on
            return ended(ok=False, error="".join(traceback.format_exception_only(error)).strip())


class LaneDevice(ABC):
    """Implements ``Device`` but for the copies.

    *worker* fills its own part of each row: the ``worker``-th stretch of ``payload_bytes`` of the row's group.
    ``on_finished`` is called on a thread of the device after each result; it should only wake somebody. Methods may be
    called from any thread. ``shutdown`` must come before the pool's ``close``. A device that is dropped without it
    warns (``ResourceWarning``), drops what is queued, and ends its threads.
    """

    _enter_lane: Callable[[], object] | None = None
    """The first call of each lane's thread. It must not refer to the device, or nobody could drop that."""

    def __init__(
        self,
        layout: KVLayout,
        pool: Pool,
        worker: int = 0,
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        """A subclass is ready before it calls this.

        Raises ``ValueError``: the workers' parts and the proof do not fit a row, the pool has no such worker, or
        *worker* has a device in this process already.
        """
        self._layout = layout
        self._addresses = [group.read_addresses() for group in layout.groups]
        self._limits = limits_for(layout, pool)
        self._is_shut_down = False
        self._letting_go = threading.Lock()
        self._leave_worker = pool.control.use_worker(worker)
        self._lanes: dict[Direction, Lane] = {}
        try:
            for direction in Direction:
                copy = partial(_carry_out, weakref.ref(self), direction)
                lane = Lane(direction, pool.control, worker, copy, on_finished, self._enter_lane)
                self._lanes[direction] = lane
        except BaseException:  # no more threads for this user, or in this control group
            for lane in self._lanes.values():
                lane.stop()
            self._is_shut_down = True
            self._leave_worker()
            raise

    def __del__(self) -> None:
        """Neither waits nor lets go of anything: a lane that is in a copy keeps what that needs until its end."""
        lanes = getattr(self, "_lanes", {})  # none where the constructor raised
        if lanes and not self._is_shut_down:
            for lane in lanes.values():
                lane.stop()
            text = f"{type(self).__name__} was dropped without shutdown"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)  # last: it may be made an error

    @abstractmethod
    def _copy(self, direction: Direction, plan: dict[int, Runs]) -> None:
        """Copy device blocks to rows, or rows to blocks, wholly before it returns. On the direction's lane."""

    @abstractmethod
    def _let_go(self) -> None:
        """No copy will follow: drop what holds the pool's mapping. Called once."""

    def _mark_compute(self, _direction: Direction) -> Callable[[], object] | None:
        """Waits for the compute that the caller has queued, when the lane calls it; ``None``: that is over by now."""
        return None

    def submit_store(self, job_id: int, parts: Sequence[GroupTransfer]) -> None:
        """See ``Device``."""
        self._submit(Direction.STORE, job_id, parts)

    def submit_load(self, job_id: int, parts: Sequence[GroupTransfer]) -> None:
        """See ``Device``."""
        self._submit(Direction.LOAD, job_id, parts)

    def _submit(self, direction: Direction, job_id: int, parts: Sequence[GroupTransfer]) -> None:
        self._lanes[direction].submit(LaneJob(job_id, copy_parts(parts), self._mark_compute(direction)))

    def get_finished(self) -> list[TransferResult]:
        """See ``Device``."""
        return [result for lane in self._lanes.values() for result in lane.take_finished()]

    def wait(self, direction: Direction, job_ids: Iterable[int], timeout_s: float) -> bool:
        """See ``Device``."""
        return self._lanes[direction].wait(job_ids, timeout_s)

    def shutdown(self, timeout_s: float) -> bool:
        """See ``Device``. After False a thread may still copy: the pool stays mapped."""
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.stop()
        ended = [lane.join(max(0.0, deadline - time.monotonic())) for lane in self._lanes.values()]
        if not all(ended):
            return False
        with self._letting_go:  # threads that shut down at once
            if not self._is_shut_down:
                self._let_go()
                self._leave_worker()
                self._is_shut_down = True
        return True

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

    def _carry_out(self, direction: Direction, parts: Sequence[GroupTransfer]) -> int:
        plan = self._plan(direction, parts)
        self._copy(direction, plan)
        return self._bytes(plan)


def _carry_out(
    reference: "weakref.ref[LaneDevice]", direction: Direction, parts: Sequence[GroupTransfer]
) -> int:
    """``Copy`` of a device. A lane's thread must not keep the device: it would live as long as the process."""
    device = reference()
    if device is None:
        raise RuntimeError("the device was dropped without shutdown")
    return device._carry_out(direction, parts)  # noqa: SLF001 - of this module


def limits_for(layout: KVLayout, pool: Pool) -> TransferLimits:
    """The limits of transfers between this layout and this pool.

    Raises ``ValueError`` when the workers' parts do not fit a row, or leave no room for its proof.
    """
    geometry = pool.geometry
    for index, payload_bytes in enumerate(layout.payload_bytes):
        if (needed := geometry.num_workers * payload_bytes + PROOF_BYTES) > geometry.row_bytes:
            raise ValueError(
                f"{geometry.num_workers} worker(s) with {payload_bytes} bytes a block of group {index}, and "
                f"{PROOF_BYTES} bytes of proof, need rows of {needed} bytes, the pool's have {geometry.row_bytes}"
            )
    return TransferLimits(
        num_blocks=tuple(group.num_blocks for group in layout.groups),
        num_rows=geometry.num_rows,
        factor=layout.block_size_factor,
    )


def worker_parts(layout: KVLayout, pool: Pool, worker: int) -> list[npt.NDArray[np.uint8]]:
    """This worker's bytes of every row, an array for each group. Raises ``ValueError`` as the devices' constructors.

    ``(num_rows, factor, block_bytes)``, or ``(num_rows, block_bytes)`` where the factor is 1.
    """
    if not 0 <= worker < pool.geometry.num_workers:
        raise ValueError(f"worker {worker} is not one of this pool's {pool.geometry.num_workers}")
    limits_for(layout, pool)
    factor = layout.block_size_factor
    parts = []
    for payload_bytes in layout.payload_bytes:
        rows = pool.rows_array[:, worker * payload_bytes : (worker + 1) * payload_bytes]
        parts.append(rows if factor == 1 else rows.reshape(len(rows), factor, payload_bytes // factor))
    return parts
