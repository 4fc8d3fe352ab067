"""The CPU device: the same interface as a GPU's, over tensors in host memory (C42).

It decides how a block's pages travel: as few and as large copies as the ids allow, one thread per direction.
numpy copies, not torch: torch would share its threads with the engine, and a busy engine then slows both.
numpy lets the interpreter go on during a copy of more than 500 bytes.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvtier_core.transfer.control import ControlPage
from kvtier_core.transfer.device import TransferResult
from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.lane import Lane, LaneJob
from kvtier_core.transfer.layout import KVLayout
from kvtier_core.transfer.plan import check_transfer, plan_runs
from kvtier_core.transfer.pool import Pool


class CPUDevice:
    """Implements ``Device``.

    *worker* fills its own slice of each row: ``payload_bytes`` from ``worker * payload_bytes`` on.
    ``on_finished`` is called on a thread of the device after each result; it should only wake somebody.
    Methods may be called from any thread. ``shutdown`` must come before the pool's ``close``.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: Pool,
        control: ControlPage,
        worker: int = 0,
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        """Raises ``ValueError``: tensors not in host memory, or the workers' slices do not fit a row."""
        if layout.device.type != "cpu":
            raise ValueError(f"the CPU device needs tensors in host memory, not on {layout.device}")
        needed, row_bytes = control.num_workers * layout.payload_bytes, pool.geometry.row_bytes
        if needed > row_bytes:
            raise ValueError(
                f"{control.num_workers} worker(s) with {layout.payload_bytes} bytes a block need rows of "
                f"{needed} bytes, the pool's have {row_bytes}"
            )
        self._layout = layout
        begin = worker * layout.payload_bytes
        slices = [
            pool.rows_array[:, begin + offset : begin + offset + size]
            for offset, size in zip(layout.page_offsets, layout.page_bytes, strict=True)
        ]  # of (num_rows, page_bytes)
        pages = [_byte_pages(tensor) for tensor in layout.tensors]  # of (num_blocks, page_bytes)
        self._num_rows = pool.geometry.num_rows
        self._pairs = list(zip(pages, slices, strict=True))
        self._lanes = {
            Direction.STORE: Lane(Direction.STORE, control, worker, self._store, on_finished),
            Direction.LOAD: Lane(Direction.LOAD, control, worker, self._load, on_finished),
        }

    def submit_store(
        self,
        job_id: int,
        block_ids: Sequence[int],
        rows: Sequence[int],
        epoch: int,
        compute_done: Callable[[], object] | None = None,
    ) -> None:
        """See ``Device``. CPU compute is over when it returns; *compute_done* is for compute elsewhere."""
        job = LaneJob(
            job_id=job_id,
            block_ids=tuple(block_ids),
            rows=tuple(rows),
            epoch=epoch,
            compute_done=compute_done,
        )
        self._lanes[Direction.STORE].submit(job)

    def submit_load(self, job_id: int, block_ids: Sequence[int], rows: Sequence[int], epoch: int) -> None:
        """See ``Device``."""
        job = LaneJob(job_id=job_id, block_ids=tuple(block_ids), rows=tuple(rows), epoch=epoch)
        self._lanes[Direction.LOAD].submit(job)

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
        self._pairs.clear()  # the pool's mapping can be freed now
        return True

    def _store(self, job: LaneJob) -> int:
        check_transfer(Direction.STORE, job.block_ids, job.rows, self._layout.num_blocks, self._num_rows)
        for block, row, length in plan_runs(job.block_ids, job.rows):
            for pages, slices in self._pairs:
                slices[row : row + length] = pages[block : block + length]
        return len(job.rows) * self._layout.payload_bytes

    def _load(self, job: LaneJob) -> int:
        check_transfer(Direction.LOAD, job.block_ids, job.rows, self._layout.num_blocks, self._num_rows)
        for block, row, length in plan_runs(job.block_ids, job.rows):
            for pages, slices in self._pairs:
                pages[block : block + length] = slices[row : row + length]
        return len(job.rows) * self._layout.payload_bytes


def _byte_pages(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The same memory as bytes, ``(num_blocks, page_bytes)``. Pages are contiguous: the layout checked."""
    num_blocks = tensor.shape[0]
    page_items = tensor.numel() // num_blocks
    flat = tensor.detach().as_strided((num_blocks, page_items), (tensor.stride(0), 1))
    # numpy has no bfloat16 or float8; bytes it has.
    pages: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return pages
