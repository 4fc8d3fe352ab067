"""Copies between rows and tensors on any device of torch's: a staging buffer there, one large copy a row (C42).

Pages of a block lie apart on the device and side by side in its row. The device gathers them into the staging buffer,
because its own memory is ten times as fast as the way to the host. One piece a row crosses that way, as large as all
layers of a block, whatever the page size. Loads go the other way round.

Decides which pieces cross together. Streams, events and pinned memory are a subclass's. Without them the whole device
is waited for before and after every transfer: right for any accelerator of torch's, and fast on none.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.lanes import LaneDevice, worker_parts
from kvtier_core.transfer.layout import KVGroup, KVLayout
from kvtier_core.transfer.plan import Runs
from kvtier_core.transfer.pool import Pool

_STAGING_BYTES = 32 << 20
_WORD = torch.int64.itemsize


class _Batch(NamedTuple):
    """Device blocks that pass the staging buffer together."""

    blocks: torch.Tensor  # (n,) int64, on the device
    pieces: list[tuple[int, int, int, int]]
    """``(place, row, slot, length)``: *length* neighbours in the buffer from *place* on belong to slots of one row."""


class _Group:
    """One group's tensors as ``(num_blocks, items)`` of the widest item that fits all of them, and its rows."""

    def __init__(self, group: KVGroup, rows: torch.Tensor) -> None:
        self.rows = rows  # uint8, (num_rows, factor, block_bytes) or (num_rows, block_bytes)
        self.block_bytes = group.block_bytes
        numbers = [
            number
            for tensor, page_bytes in zip(group.tensors, group.page_bytes, strict=True)
            for number in (tensor.data_ptr(), page_bytes, tensor.stride(0) * tensor.element_size())
        ]
        self.item = torch.int64 if all(number % _WORD == 0 for number in numbers) else torch.uint8
        self.pages = [_as_items(tensor, self.item) for tensor in group.tensors]
        self.offsets = [offset // self.item.itemsize for offset in group.page_offsets]

    def places(self, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor's pages, and where they are in a staging buffer ``(n, block_bytes)``."""
        items = staging.view(self.item)
        for pages, offset in zip(self.pages, self.offsets, strict=True):
            yield pages, items[:, offset : offset + pages.shape[1]]


class StagedDevice(LaneDevice):
    """Implements ``Device`` for tensors anywhere. See ``LaneDevice``.

    ``staging_bytes`` is the size of each direction's buffer on the device, or one row's worth if that is more.
    """

    _queues = False
    """Whether copies may be queued; else each is over when torch returns."""

    def __init__(
        self,
        layout: KVLayout,
        pool: Pool,
        worker: int = 0,
        on_finished: Callable[[], None] | None = None,
        *,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        """Raises ``ValueError`` for what ``LaneDevice`` refuses."""
        self._factor = layout.block_size_factor
        self._groups = [
            _Group(group, torch.from_numpy(part))
            for group, part in zip(layout.groups, worker_parts(layout, pool, worker), strict=True)
        ]
        room = max(staging_bytes, *layout.payload_bytes)
        self._device = layout.groups[0].device
        self._staging: dict[Direction, torch.Tensor] = {}
        for direction in Direction:
            with self._on(direction):  # the memory may still be in use by what is queued elsewhere
                self._staging[direction] = torch.empty(room, dtype=torch.uint8, device=self._device)
        super().__init__(layout, pool, worker, on_finished)

    def _on(self, direction: Direction) -> AbstractContextManager[object]:
        """Where the copies of a direction are queued, after the compute that they must follow."""
        self._settle(direction)
        return nullcontext()

    def _settle(self, _direction: Direction) -> None:
        """Return when all that was queued is done."""
        getattr(torch, self._device.type).synchronize(self._device)

    def _to_device(self, numbers: torch.Tensor) -> torch.Tensor:
        """The same numbers on the device."""
        return numbers.to(self._device)

    def _copy(self, direction: Direction, plan: dict[int, Runs]) -> None:
        move = self._store if direction is Direction.STORE else self._load
        # In inference mode: an engine's KV is often made in it, and can't be written to outside.
        with torch.inference_mode(), self._on(direction):
            try:
                for group, batch in self._batches(plan):
                    count = len(batch.blocks)
                    staging = self._staging[direction][: count * group.block_bytes]
                    move(group, batch, staging.view(count, group.block_bytes))
            finally:  # also when something went wrong half way, what was queued is over
                self._settle(direction)

    def _store(self, group: _Group, batch: _Batch, staging: torch.Tensor) -> None:
        for pages, places in group.places(staging):
            torch.index_select(pages, 0, batch.blocks, out=places)
        for place, row, slot, length in batch.pieces:
            piece = staging[place : place + length].view(-1)
            self._row(group, row, slot, length).copy_(piece, non_blocking=self._queues)

    def _load(self, group: _Group, batch: _Batch, staging: torch.Tensor) -> None:
        for place, row, slot, length in batch.pieces:
            piece = staging[place : place + length].view(-1)
            piece.copy_(self._row(group, row, slot, length), non_blocking=self._queues)
        for pages, places in group.places(staging):
            pages.index_copy_(0, batch.blocks, places)

    def _let_go(self) -> None:
        self._groups.clear()
        self._staging.clear()

    def _row(self, group: _Group, row: int, slot: int, length: int) -> torch.Tensor:
        """Slots of one row, contiguous bytes."""
        return group.rows[row] if self._factor == 1 else group.rows[row, slot : slot + length].view(-1)

    def _batches(self, plan: dict[int, Runs]) -> Iterator[tuple[_Group, _Batch]]:
        """Cut the runs into pieces of one row each, as many at a time as the staging buffer holds."""
        if not plan:
            return
        pieces = {index: _cut_into_rows(runs) if self._factor == 1 else runs for index, runs in plan.items()}
        # One way to the device for all ids: each would cost as much as a large copy, and may wait for those queued.
        ids = np.concatenate([_expand(blocks, lengths) for blocks, _, _, lengths in pieces.values()])
        blocks_there = self._to_device(torch.from_numpy(ids))
        for index, columns in pieces.items():
            group = self._groups[index]
            count = int(columns[3].sum())
            for batch in self._batches_of(group, columns, blocks_there[:count]):
                yield group, batch
            blocks_there = blocks_there[count:]

    def _batches_of(self, group: _Group, pieces: Runs, blocks: torch.Tensor) -> Iterator[_Batch]:
        room = len(self._staging[Direction.STORE]) // group.block_bytes
        _, rows, slots, lengths = pieces
        ends = np.cumsum(lengths)
        begin = 0
        while begin < len(ends):
            before = int(ends[begin - 1]) if begin else 0
            end = int(np.searchsorted(ends, before + room, side="right"))
            some = slice(begin, end)
            columns = (ends[some] - lengths[some] - before, rows[some], slots[some], lengths[some])
            yield _Batch(
                blocks[before : int(ends[end - 1])],
                list(zip(*(column.tolist() for column in columns), strict=True)),
            )
            begin = end


def _cut_into_rows(runs: Runs) -> Runs:
    """At a factor of 1, where a run is several rows: a piece a row."""
    blocks, rows, _, lengths = runs
    blocks, rows = _expand(blocks, lengths), _expand(rows, lengths)
    return np.array((blocks, rows, np.zeros_like(blocks), np.ones_like(blocks)))


def _expand(firsts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Every number of the stretches that begin with *firsts*."""
    before = np.cumsum(lengths) - lengths
    numbers: npt.NDArray[np.int64] = np.arange(lengths.sum()) + np.repeat(firsts - before, lengths)
    return numbers


def _as_items(tensor: torch.Tensor, item: torch.dtype) -> torch.Tensor:
    """The same memory, ``(num_blocks, items of a page)``."""
    num_blocks = tensor.shape[0]
    flat = tensor.detach().as_strided((num_blocks, tensor.numel() // num_blocks), (tensor.stride(0), 1))
    return flat.view(torch.uint8).view(item)
