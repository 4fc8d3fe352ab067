"""Copies between rows and tensors on an accelerator with streams: queued at submission, over when an event says so.

A job is arrays of (source, destination, bytes), made by numpy. The copy stream of its direction waits for the compute
that the caller has queued. One call then takes the whole batch, and one event follows it. Nothing waits outside the
device's streams, so waiting for the whole device waits for these copies.

A block that is one piece on the device, or has large pages, goes straight from its pages to its row. Small pages would
cost one copy each. The device gathers them first, because its own memory is ten times as fast as the way to the host.
Then one piece a block crosses. Loads go the other way round.
"""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.lanes import Copies, LaneDevice, Outcome, describe, worker_parts
from kvtier_core.transfer.layout import KVGroup, KVLayout
from kvtier_core.transfer.plan import GroupTransfer, Numbers, Runs
from kvtier_core.transfer.pool import Pool

CopyBatch = Callable[[Numbers, Numbers, Numbers], object]
"""Queues copies on torch's current stream: takes the addresses to copy from, those to copy to, and the bytes of each.

It must not read a source before the stream has come to the copy. The arrays are contiguous, and the caller's again when
it returns.
"""

_GATHER_BELOW = 64 << 10
"""Pages of fewer bytes are gathered. A copy engine spends about 1 us on each copy. A link of 55 GB/s moves this much in
that time, so copies of larger pages fill it. Computed, not measured: there was no GPU."""
_STAGING_BYTES = 32 << 20
"""Of device memory for each direction to gather in, or one block if that is larger; none where nothing is gathered."""
_IDS = 1 << 17
"""Ids of gathered blocks, of each direction, that may be on their way to the device: 1 MiB of pinned memory. Blocks of
8 KiB are 1 GiB then. Where there are more, a submission waits for the oldest."""
_COPIES_A_CALL = 8192
"""ROCm faults above."""
_WORD = torch.int64.itemsize


class _Group:
    """One group's pages and rows by address."""

    def __init__(self, group: KVGroup, rows: npt.NDArray[np.uint8]) -> None:
        self.block_bytes, self._slot_bytes = group.block_bytes, group.slot_bytes
        # (tensors,), all four; the addresses are those of block 0, the offsets count from its first page
        self._pages = np.array(group.read_addresses(), dtype=np.int64)
        self._strides = np.array([tensor.stride(0) * tensor.element_size() for tensor in group.tensors])
        self._sizes = np.array(group.page_bytes)
        self._offsets = np.array(group.page_offsets) - group.page_offsets[0]
        self._rows, self._row_bytes = rows.ctypes.data + group.page_offsets[0], rows.strides[0]
        self._has_slots = rows.ndim > 2  # noqa: PLR2004 - (num_rows, factor, slot_bytes)
        is_one_piece = len(group.pieces) == 1  # what is gathered crosses as it will lie in the row
        self.is_gathered = is_one_piece and len(group.tensors) > 1 and max(group.page_bytes) < _GATHER_BELOW
        numbers = (*self._pages, *self._strides, *self._sizes)
        item = torch.int64 if all(number % _WORD == 0 for number in numbers) else torch.uint8
        self._tensors = [_as_items(tensor, item) for tensor in group.tensors] if self.is_gathered else []

    def find(self, runs: Runs) -> tuple[Numbers, Numbers]:
        """Every block of *runs*, and the address of its first page in a row."""
        blocks, rows, slots, lengths = runs
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        firsts = self._rows + rows * self._row_bytes + slots * self._slot_bytes
        step = self._slot_bytes if self._has_slots else self._row_bytes
        return np.repeat(blocks, lengths) + within, np.repeat(firsts, lengths) + within * step

    def pages(self, blocks: Numbers, places: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """The addresses of all pages, on the device and in rows, and their bytes."""
        pages = blocks[:, None] * self._strides + self._pages  # (blocks, tensors)
        if pages.shape[1] == 1:
            return _join(pages[:, 0], places, self.block_bytes)
        return (
            pages.ravel(),
            (places[:, None] + self._offsets).ravel(),
            np.broadcast_to(self._sizes, pages.shape).ravel(),
        )

    def gather(self, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        """Put the blocks' pages side by side into *staging*, ``(blocks, block_bytes)``."""
        for pages, places in self._places(staging):
            torch.index_select(pages, 0, blocks, out=places)

    def scatter(self, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        """The other way round."""
        for pages, places in self._places(staging):
            pages.index_copy_(0, blocks, places)

    def _places(self, staging: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for pages, offset in zip(self._tensors, self._offsets.tolist(), strict=True):
            begin = offset // pages.element_size()
            yield pages, staging.view(pages.dtype)[:, begin : begin + pages.shape[1]]


class _Staging:
    """Where the blocks of one direction are gathered, and their ids: memory that is taken once.

    Freshly pinned memory would stop the device for a moment, and fresh memory of the device is the engine's.
    """

    def __init__(self, block_bytes: int, ids: torch.Tensor, device: torch.device) -> None:
        """For blocks of *block_bytes* or fewer. *ids* is memory of the host that the device copies from."""
        self.memory = torch.empty(max(_STAGING_BYTES, block_bytes), dtype=torch.uint8, device=device)
        self._there = torch.empty(len(ids), dtype=torch.int64, device=device)
        self._here = ids
        self._end = 0
        """Of the ids so far, which go round in their memory."""
        self._on_their_way: deque[tuple[int, Any]] = deque()
        """Where some begin, and the event after which their room is free again."""

    def room(self, block_bytes: int) -> int:
        """How many blocks can be gathered at a time."""
        return min(len(self.memory) // block_bytes, len(self._here))

    def bring(self, ids: Numbers, event: Any) -> torch.Tensor:  # noqa: ANN401 - torch's own for this device
        """Queue their way to the device, *event* behind it; at most ``room``, in place until the next are brought."""
        size = len(self._here)
        begin = self._end if self._end % size + len(ids) <= size else -(-self._end // size) * size
        while self._on_their_way and self._on_their_way[0][0] + size < begin + len(ids):
            self._on_their_way.popleft()[1].synchronize()
        self._end = begin + len(ids)
        here, there = self._here[begin % size :][: len(ids)], self._there[: len(ids)]
        here.numpy()[:] = ids
        there.copy_(here, non_blocking=True)
        event.record()
        self._on_their_way.append((begin, event))
        return there


class StreamDevice(LaneDevice):
    """Implements ``Device`` for tensors on any accelerator that has streams in torch. See ``LaneDevice``.

    Copies that were handed over are never dropped, since nothing takes them out of a stream: a shutdown waits for them.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: Pool,
        worker: int = 0,
        on_finished: Callable[[], None] | None = None,
        copy_batch: CopyBatch | None = None,
    ) -> None:
        """*copy_batch* is the engine's own; without it torch copies piece after piece.

        Raises ``ValueError`` for an accelerator without streams, and for what ``LaneDevice`` refuses.
        """
        self._torch = getattr(torch, layout.device.type)
        if not hasattr(self._torch, "Stream"):
            raise ValueError(f"KV on {layout.device} can not be moved: torch has no streams there")
        rows = worker_parts(layout, pool, worker)
        self._rows = rows  # a mapping that they are in stays
        self._groups = [_Group(group, part) for group, part in zip(layout.groups, rows, strict=True)]
        self._device = layout.groups[0].device
        # Of torch's default priority, which is CUDA's lowest.
        self._streams = {direction: self._torch.Stream(layout.device) for direction in Direction}
        self._staging: dict[Direction, _Staging] = {}
        if gathered := [group.block_bytes for group in self._groups if group.is_gathered]:
            for direction, stream in self._streams.items():
                ids = self._host_memory(_IDS)
                with self._torch.stream(stream):  # the memory may still be in use by what is queued elsewhere
                    self._staging[direction] = _Staging(max(gathered), ids, self._device)
        tensors = [tensor for group in layout.groups for tensor in group.tensors]
        buffers = [staging.memory for staging in self._staging.values()]
        self._copy_batch = copy_batch or _CopyLoop([torch.from_numpy(pool.rows_array), *tensors, *buffers])
        super().__init__(layout, pool, worker, on_finished)

    def _event(self) -> Any:  # noqa: ANN401 - torch's own for this device
        return self._torch.Event(enable_timing=True)

    def _host_memory(self, count: int) -> torch.Tensor:
        """Memory of the host, from which the device copies numbers."""
        return torch.empty(count, dtype=torch.int64)

    def _enter_lane(self) -> None:
        # Else waiting for an event makes a context on GPU 0: some hundred MiB.
        self._torch.set_device(self._layout.device)

    def _begin(self, direction: Direction, parts: Sequence[GroupTransfer]) -> Copies:
        plan = self._plan(direction, parts)
        stream, begun, ended = self._streams[direction], self._event(), self._event()
        stream.wait_stream(self._torch.current_stream(self._layout.device))
        begun.record(stream)
        error = None
        try:
            # In inference mode: an engine's KV is often made in it, and can't be written to outside.
            with torch.inference_mode(), self._torch.stream(stream):
                for index, runs in plan.items():
                    self._queue(direction, self._groups[index], runs)
        except Exception as found:  # noqa: BLE001 - the job's, but not before what was queued is over
            error = describe(found)
        ended.record(stream)
        moved = self._bytes(plan)

        def end() -> Outcome:
            ended.synchronize()
            if error is not None:
                return Outcome(error=error)
            return Outcome(bytes=moved, seconds=begun.elapsed_time(ended) / 1e3)

        return Copies(end, ended.query)

    def _queue(self, direction: Direction, group: _Group, runs: Runs) -> None:
        blocks, places = group.find(runs)
        if not group.is_gathered:
            self._copy(direction, *group.pages(blocks, places))
            return
        staging = self._staging[direction]
        room = staging.room(group.block_bytes)
        for begin in range(0, len(blocks), room):
            some, slots = blocks[begin : begin + room], places[begin : begin + room]
            ids = staging.bring(some, self._event())
            whole = staging.memory[: len(slots) * group.block_bytes].view(len(slots), group.block_bytes)
            addresses = whole.data_ptr() + np.arange(len(slots)) * group.block_bytes
            cross = partial(self._copy, direction, *_join(addresses, slots, group.block_bytes))
            if direction is Direction.STORE:
                group.gather(ids, whole)
                cross()
            else:
                cross()
                group.scatter(ids, whole)

    def _copy(self, direction: Direction, pages: Numbers, places: Numbers, sizes: Numbers) -> None:
        """Between the device and rows, in one call or few."""
        sources, targets = (pages, places) if direction is Direction.STORE else (places, pages)
        for begin in range(0, len(sizes), _COPIES_A_CALL):
            some = slice(begin, begin + _COPIES_A_CALL)
            self._copy_batch(sources[some], targets[some], sizes[some])

    def _let_go(self) -> None:
        self._rows.clear()
        self._groups.clear()
        self._staging.clear()
        del self._copy_batch


class _CopyLoop:
    """A ``CopyBatch`` by torch alone: 5 us a piece."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        whole = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._addresses = sorted(whole)
        self._memories = [_as_bytes(whole[address]) for address in self._addresses]

    def __call__(self, sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            self._find(target, size).copy_(self._find(source, size), non_blocking=True)

    def _find(self, address: int, size: int) -> torch.Tensor:
        index = bisect(self._addresses, address) - 1
        begin = address - self._addresses[index]
        return self._memories[index][begin : begin + size]


def _join(ones: Numbers, others: Numbers, size: int) -> tuple[Numbers, Numbers, Numbers]:
    """Pieces of *size* bytes that are neighbours on both sides as one; each side's addresses, and the bytes."""
    begins = np.ones(len(ones), dtype=bool)
    begins[1:] = (np.diff(ones) != size) | (np.diff(others) != size)
    starts = begins.nonzero()[0]
    return ones[starts], others[starts], np.diff(starts, append=len(ones)) * size


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that *tensor* is in."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _as_items(tensor: torch.Tensor, item: torch.dtype) -> torch.Tensor:
    """The same memory, ``(num_blocks, items of a page)``."""
    num_blocks = tensor.shape[0]
    flat = tensor.detach().as_strided((num_blocks, tensor.numel() // num_blocks), (tensor.stride(0), 1))
    return flat.view(torch.uint8).view(item)
