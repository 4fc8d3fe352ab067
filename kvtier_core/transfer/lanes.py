"""A device that copies on threads: a lane for each direction, jobs in, results out. Subclasses say what a copy is.

The interface of devices knows no lanes: a device that queues its copies on streams needs none.
"""

import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier_core.transfer.device import TransferResult
from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.lane import Copy, Lane, LaneJob
from kvtier_core.transfer.layout import KVLayout
from kvtier_core.transfer.plan import GroupTransfer, Runs, TransferLimits, copy_parts, plan_transfer
from kvtier_core.transfer.pool import Pool
from kvtier_core.transfer.row import PROOF_BYTES


class LaneDevice(ABC):
    """Implements ``Device`` but for the copies.

    *worker* fills its own part of each row: the ``worker``-th stretch of ``payload_bytes`` of the row's group.
    ``on_finished`` is called on a thread of the device after each result; it should only wake somebody. Methods may be
    called from any thread. ``shutdown`` must come before the pool's ``close``; a device that is dropped without it says
    so by a ``ResourceWarning``, drops what is queued, and ends its threads.
    """

    _enter_lane: Callable[[], object] | None = None
    """What each lane's thread does first, where a device needs that. It must not refer to the device."""

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
        copies = {Direction.STORE: self._carry_out_store, Direction.LOAD: self._carry_out_load}
        self._lanes: dict[Direction, Lane] = {}
        try:
            for direction, copy in copies.items():
                lane = Lane(direction, pool.control, worker, _weakly(copy), on_finished, self._enter_lane)
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
    def _store(self, plan: dict[int, Runs]) -> None:
        """Copy device blocks to rows, wholly before it returns. On the store lane's thread."""

    @abstractmethod
    def _load(self, plan: dict[int, Runs]) -> None:
        """Copy rows to device blocks, wholly before it returns. On the load lane's thread."""

    @abstractmethod
    def _let_go(self) -> None:
        """No copy will follow: drop what holds the pool's mapping. Called once."""

    def _mark_compute(self, _direction: Direction) -> Callable[[], object] | None:
        """What a lane waits by for the compute that the caller has queued; ``None`` where that is over by now."""
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

    def _carry_out_store(self, parts: Sequence[GroupTransfer]) -> int:
        plan = self._plan(Direction.STORE, parts)
        self._store(plan)
        return self._bytes(plan)

    def _carry_out_load(self, parts: Sequence[GroupTransfer]) -> int:
        plan = self._plan(Direction.LOAD, parts)
        self._load(plan)
        return self._bytes(plan)

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


def _weakly(method: Copy) -> Copy:
    """The same, without keeping its device: a lane's thread would, as long as the process lives."""
    reference = weakref.WeakMethod(method)

    def copy(parts: Sequence[GroupTransfer]) -> int:
        alive = reference()
        if alive is None:
            raise RuntimeError("the device was dropped without shutdown")
        return alive(parts)

    return copy


def limits_for(layout: KVLayout, pool: Pool) -> TransferLimits:
    """What transfers between this layout and this pool must stay inside.

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
