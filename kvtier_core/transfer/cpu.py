"""The CPU device: the same interface as a GPU's, over tensors in host memory (C42).

It decides how pages travel: as few and as large copies as the ids and the tensors' places in memory allow, one thread
per direction. numpy copies, not torch: torch would share its threads with the engine, and a busy engine then slows
both. numpy lets the interpreter go on during a copy of more than 500 bytes.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier_core.transfer.control import ControlPage
from kvtier_core.transfer.device import TransferResult
from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.lane import Lane, LaneJob
from kvtier_core.transfer.layout import KVGroup, KVLayout
from kvtier_core.transfer.plan import GroupTransfer, Runs, TransferLimits, plan_transfer
from kvtier_core.transfer.pool import Pool
from kvtier_core.transfer.spans import Span, join

_Bytes = npt.NDArray[np.uint8]


class _Pair(NamedTuple):
    """The same pages on both sides."""

    pages: _Bytes  # (num_blocks, ..., page_bytes)
    slots: _Bytes  # (num_rows, factor, ..., page_bytes); at a factor of 1 (num_rows, ..., page_bytes)


_Indices = tuple[list[slice], Sequence[slice | tuple[int, slice]]]


class CPUDevice:
    """Implements ``Device``.

    *worker* fills its own part of each row: the ``worker``-th stretch of ``payload_bytes`` of the row's group.
    ``on_finished`` is called on a thread of the device after each result; it should only wake somebody. Methods may be
    called from any thread. ``shutdown`` must come before the pool's ``close``.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: Pool,
        control: ControlPage,
        worker: int = 0,
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        """Raises ``ValueError``: tensors not in host memory, or the workers' parts do not fit a row."""
        if layout.device.type != "cpu":
            raise ValueError(f"the CPU device needs tensors in host memory, not on {layout.device}")
        self._layout = layout  # keeps the tensors' memory, which the pairs point into
        self._limits = limits_for(layout, pool)
        parts = [
            _worker_part(pool, layout.block_size_factor, group.block_bytes, worker) for group in layout.groups
        ]
        self._whole = [
            _pair_up(group, slots, range(len(group.tensors)))
            for group, slots in zip(layout.groups, parts, strict=True)
        ]
        self._by_layer = {
            layer: [
                _pair_up(group, slots, [i for i, number in enumerate(group.layers) if number == layer])
                for group, slots in zip(layout.groups, parts, strict=True)
            ]
            for layer in sorted({layer for group in layout.groups for layer in group.layers})
        }
        self._lanes = {
            Direction.STORE: Lane(Direction.STORE, control, worker, self._store, on_finished),
            Direction.LOAD: Lane(Direction.LOAD, control, worker, self._load, on_finished),
        }

    def submit_store(
        self,
        job_id: int,
        parts: Sequence[GroupTransfer],
        epoch: int,
        compute_done: Callable[[], object] | None = None,
    ) -> None:
        """See ``Device``. CPU compute is over when it returns; *compute_done* is for compute elsewhere."""
        job = LaneJob(job_id=job_id, parts=tuple(parts), epoch=epoch, compute_done=compute_done)
        self._lanes[Direction.STORE].submit(job)

    def submit_load(
        self, job_id: int, parts: Sequence[GroupTransfer], epoch: int, *, by_layer: bool = False
    ) -> None:
        """See ``Device``."""
        job = LaneJob(job_id=job_id, parts=tuple(parts), epoch=epoch, by_layer=by_layer)
        self._lanes[Direction.LOAD].submit(job)

    def get_finished(self) -> list[TransferResult]:
        """See ``Device``."""
        return [result for lane in self._lanes.values() for result in lane.take_finished()]

    def wait(self, direction: Direction, job_ids: Iterable[int], timeout_s: float) -> bool:
        """See ``Device``."""
        return self._lanes[direction].wait(job_ids, timeout_s)

    def wait_layer(self, job_id: int, layer: int, timeout_s: float) -> bool:
        """See ``Device``."""
        return self._lanes[Direction.LOAD].wait_layer(job_id, layer, timeout_s)

    def shutdown(self, timeout_s: float) -> bool:
        """See ``Device``. After False a thread may still copy: the pool stays mapped."""
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.stop()
        ended = [lane.join(max(0.0, deadline - time.monotonic())) for lane in self._lanes.values()]
        if not all(ended):
            return False
        self._whole.clear()  # the pool's mapping can be freed now
        self._by_layer.clear()
        return True

    def _store(self, job: LaneJob, _reached: Callable[[int], None]) -> int:
        plan = plan_transfer(Direction.STORE, job.parts, self._limits)
        for group, runs in plan.items():
            blocks, places = self._indices(runs)
            for pages, slots in self._whole[group]:
                for block, place in zip(blocks, places, strict=True):
                    slots[place] = pages[block]
        return self._bytes(plan)

    def _load(self, job: LaneJob, reached: Callable[[int], None]) -> int:
        plan = plan_transfer(Direction.LOAD, job.parts, self._limits)
        indices = {group: self._indices(runs) for group, runs in plan.items()}
        if not job.by_layer:
            _fill(indices, self._whole)
            return self._bytes(plan)
        for layer, pairs in self._by_layer.items():
            _fill(indices, pairs)
            reached(layer)
        return self._bytes(plan)

    def _indices(self, runs: Runs) -> _Indices:
        """What to index ``_Pair.pages`` and ``_Pair.slots`` with, a run each."""
        columns = runs.tolist()
        blocks = [slice(block, block + length) for block, length in zip(columns[0], columns[3], strict=True)]
        if self._limits.factor == 1:
            return blocks, [
                slice(row, row + length) for row, length in zip(columns[1], columns[3], strict=True)
            ]
        return blocks, [
            (row, slice(slot, slot + length)) for row, slot, length in zip(*columns[1:], strict=True)
        ]

    def _bytes(self, plan: dict[int, Runs]) -> int:
        return sum(
            self._layout.groups[group].block_bytes * int(runs[3].sum()) for group, runs in plan.items()
        )


def _fill(indices: dict[int, _Indices], pairs: Sequence[Sequence[_Pair]]) -> None:
    for group, (blocks, places) in indices.items():
        for pages, slots in pairs[group]:
            for block, place in zip(blocks, places, strict=True):
                pages[block] = slots[place]


def limits_for(layout: KVLayout, pool: Pool) -> TransferLimits:
    """What transfers between this layout and this pool must stay inside.

    Raises ``ValueError`` when the workers' parts do not fit a row.
    """
    geometry = pool.geometry
    for index, payload_bytes in enumerate(layout.payload_bytes):
        if (needed := geometry.num_workers * payload_bytes) > geometry.row_bytes:
            raise ValueError(
                f"{geometry.num_workers} worker(s) with {payload_bytes} bytes a block of group {index} need rows of "
                f"{needed} bytes, the pool's have {geometry.row_bytes}"
            )
    return TransferLimits(
        num_blocks=tuple(group.num_blocks for group in layout.groups),
        num_rows=geometry.num_rows,
        factor=layout.block_size_factor,
    )


def _worker_part(pool: Pool, factor: int, block_bytes: int, worker: int) -> _Bytes:
    """This worker's bytes of every row, ``(num_rows, factor, block_bytes)``, or without the factor where it is 1."""
    begin = worker * factor * block_bytes
    rows = pool.rows_array[:, begin : begin + factor * block_bytes]
    return rows if factor == 1 else rows.reshape(len(rows), factor, block_bytes)


def _pair_up(group: KVGroup, slots: _Bytes, tensors: Sequence[int]) -> list[_Pair]:
    """Views of both sides for these tensors, neighbours in the row: as few as their addresses allow."""
    pairs = []
    offset = group.page_offsets[tensors[0]] if tensors else 0
    for span in join([_span(group.tensors[i], group.page_bytes[i]) for i in tensors]):
        size = span.num_pages * span.page_bytes
        part = slots[..., offset : offset + size].reshape(*slots.shape[:-1], *span.shape)
        assert np.may_share_memory(part, slots), "a copy would be filled instead of the row"
        pairs.append(_Pair(span.view(group.num_blocks), part))
        offset += size
    return pairs


def _span(tensor: torch.Tensor, page_bytes: int) -> Span:
    # numpy has no bfloat16 or float8, and needs none: pages are contiguous bytes, as the layout checked.
    return Span(tensor.data_ptr(), page_bytes, tensor.stride(0) * tensor.element_size())
