"""Devices that lie: each makes one mistake that the self-test must see, on the simulated GPU.

They share nothing with kvtier's devices. ``Device`` is an honest one in its smallest form, and each liar changes one of
its steps. The honest one must pass, or a liar that is caught proves nothing.
"""

import mmap
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from kvtier_core.transfer import (
    SELF_TEST_JOBS,
    CUDADevice,
    Device,
    Direction,
    GroupTransfer,
    KVLayout,
    Pool,
    PoolGeometry,
    TransferResult,
    self_test,
)
from kvtier_core.transfer.rounds import SelfTestError
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import row_bytes, said_to_be_on_a_gpu
from tests.transfer.simgpu.gpu import GPU

STORE, LOAD = Direction.STORE, Direction.LOAD
TRIES = 6
"""A liar that passes the self-test in this many scenes is not caught. Most are caught in the first."""
_LATE_S = 0.005
_FAR_STEP = 1 << 26
_FAR_BLOCKS = 80  # the last ones begin beyond 2**32 bytes


class Page(NamedTuple):
    """One page of a device block on its way, and its bytes of the flat pool."""

    group: int
    tensor: int
    block: int
    begin: int
    size: int


class Honest:
    """A device on the simulated GPU that does what it should: a stream and a queue of results for each direction."""

    def __init__(self, layout: KVLayout, pool: Pool, worker: int, gpu: GPU) -> None:
        self._layout, self._worker, self._gpu = layout, worker, gpu
        self._row_bytes = pool.geometry.row_bytes
        self._flat = torch.from_numpy(pool.rows_array.reshape(-1))
        self._streams = {direction: gpu.Stream(layout.device) for direction in Direction}
        self._ended: dict[tuple[Direction, int], threading.Event] = {}
        self._told: set[tuple[Direction, int]] = set()

    def submit(self, direction: Direction, job_id: int, parts: Sequence[GroupTransfer]) -> None:
        stream, ended = self._streams[direction], threading.Event()
        self._ended[direction, job_id] = ended
        if self.waits(direction):
            computed = threading.Event()
            self._gpu.compute.launch(computed.set)
            stream.launch(partial(computed.wait, TIMEOUT_S))
        if self.is_early(direction):
            stream.launch(ended.set)
            stream.launch(partial(time.sleep, _LATE_S))
        for page in self.chosen(direction, list(self._pages(parts))):
            stream.launch(partial(self.copy, direction, page))
        stream.launch(ended.set)

    def wait(self, direction: Direction, job_ids: Iterable[int], timeout_s: float) -> bool:
        return all(self._ended[direction, job].wait(timeout_s) for job in job_ids)

    def get_finished(self) -> list[TransferResult]:
        done = [job for job, ended in self._ended.items() if ended.is_set() and job not in self._told]
        self._told.update(done)
        return [TransferResult(job_id=job, direction=direction, ok=True) for direction, job in done]

    def shutdown(self, timeout_s: float) -> bool:
        return all(self.wait(direction, [job], timeout_s) for direction, job in self._ended)

    # -- the steps that a liar changes

    def waits(self, direction: Direction) -> bool:
        """Whether the copies wait for compute."""
        return True

    def is_early(self, direction: Direction) -> bool:
        """Whether the result comes before the copies."""
        return False

    def chosen(self, direction: Direction, pages: list[Page]) -> list[Page]:
        """The pages that are copied."""
        return pages

    def slot(self, part: GroupTransfer, at: int) -> tuple[int, int]:
        """Row and slot of a part's block."""
        factor = self._layout.block_size_factor
        at += part.first_slot
        return int(part.rows[at // factor]), at % factor

    def offset(self, group: int, tensor: int, block: int) -> int:
        """Where a block's page begins, in bytes from its tensor's begin."""
        pages = self._layout.groups[group].tensors[tensor]
        return block * pages.stride(0) * pages.element_size()

    def at_row(self, page: Page) -> torch.Tensor:
        return self._flat[page.begin : page.begin + page.size]

    def at_device(self, page: Page) -> torch.Tensor:
        pages = self._layout.groups[page.group].tensors[page.tensor]
        flat = pages.as_strided((pages.untyped_storage().nbytes(),), (1,), 0)
        begin = pages.storage_offset() + self.offset(page.group, page.tensor, page.block)
        return flat[begin : begin + page.size]

    def copy(self, direction: Direction, page: Page) -> None:
        """On the direction's stream."""
        if direction is STORE:
            self.at_row(page).copy_(self.at_device(page))
        else:
            self.at_device(page).copy_(self.at_row(page))

    def _pages(self, parts: Sequence[GroupTransfer]) -> Iterator[Page]:
        for part in parts:
            group = self._layout.groups[part.group]
            for at, block in enumerate(part.block_ids):
                row, slot = self.slot(part, at)
                begin = row * self._row_bytes + self._worker * self._layout.payload_bytes[part.group]
                begin += slot * group.block_bytes
                for tensor, (offset, size) in enumerate(
                    zip(group.page_offsets, group.page_bytes, strict=True)
                ):
                    yield Page(part.group, tensor, int(block), begin + offset, size)


class NoWaitOfStores(Honest):
    def waits(self, direction: Direction) -> bool:
        return direction is LOAD


class NoWaitOfLoads(Honest):
    def waits(self, direction: Direction) -> bool:
        return direction is STORE


class EarlyEventOfStores(Honest):
    def is_early(self, direction: Direction) -> bool:
        return direction is STORE


class EarlyEventOfLoads(Honest):
    def is_early(self, direction: Direction) -> bool:
        return direction is LOAD


class WrongStride(Honest):
    """Takes blocks to lie side by side, in both directions."""

    def offset(self, group: int, tensor: int, block: int) -> int:
        return block * self._layout.groups[group].page_bytes[tensor]


class Offset32Bits(Honest):
    """Counts bytes in 32 bits, in both directions."""

    def offset(self, group: int, tensor: int, block: int) -> int:
        return super().offset(group, tensor, block) % (1 << 32)


class SwappedPages(Honest):
    """Takes the pages of a block in the other order, in both directions."""

    def at_row(self, page: Page) -> torch.Tensor:
        group = self._layout.groups[page.group]
        first = page.begin - group.page_offsets[page.tensor]
        behind = sum(group.page_bytes[page.tensor + 1 :])
        return self._flat[first + behind : first + behind + page.size]


class LateWrite(Honest):
    """Writes what the first load wrote again, when the last one comes."""

    late = LOAD

    def __init__(self, layout: KVLayout, pool: Pool, worker: int, gpu: GPU) -> None:
        super().__init__(layout, pool, worker, gpu)
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._jobs = 0

    def copy(self, direction: Direction, page: Page) -> None:
        super().copy(direction, page)
        if direction is self.late and self._jobs == 1:
            written = self.at_device(page) if direction is LOAD else self.at_row(page)
            self._first.append((written, written.clone()))

    def chosen(self, direction: Direction, pages: list[Page]) -> list[Page]:
        self._jobs += direction is self.late
        if self._jobs == SELF_TEST_JOBS:
            for place, content in self._first:
                place.copy_(content)
            self._first.clear()
        return pages


class LateRow(LateWrite):
    """Writes what the first store wrote again, when the last one comes."""

    late = STORE


class TouchesNextBlock(Honest):
    """Writes 8 bytes of the blocks behind those of a load."""

    def chosen(self, direction: Direction, pages: list[Page]) -> list[Page]:
        self._ids = {(page.group, page.block) for page in pages}
        return pages

    def copy(self, direction: Direction, page: Page) -> None:
        super().copy(direction, page)
        behind = page.group, page.block + 1
        is_there = behind[1] < self._layout.groups[page.group].num_blocks
        if direction is LOAD and is_there and behind not in self._ids:
            self.at_device(page._replace(block=behind[1]))[:8] = 0


class TouchesNextRow(Honest):
    """Writes 8 bytes more than it should before each page of a store."""

    def copy(self, direction: Direction, page: Page) -> None:
        if direction is STORE and page.tensor == 0:
            self._flat[max(0, page.begin - 8) : page.begin] = 0
        super().copy(direction, page)


class StoresOnly(Honest):
    def chosen(self, direction: Direction, pages: list[Page]) -> list[Page]:
        return pages if direction is STORE else []


class LoadsOnly(Honest):
    def chosen(self, direction: Direction, pages: list[Page]) -> list[Page]:
        return pages if direction is LOAD else []


class PartialSlot(Honest):
    """Counts slots from the row's first, in both directions."""

    def slot(self, part: GroupTransfer, at: int) -> tuple[int, int]:
        factor = self._layout.block_size_factor
        return int(part.rows[at // factor]), at % factor


class WholeRow(Honest):
    """Stores zeros into the slots of the first row that are not the job's."""

    def slot(self, part: GroupTransfer, at: int) -> tuple[int, int]:
        row, slot = super().slot(part, at)
        size = self._layout.groups[part.group].block_bytes
        begin = row * self._row_bytes + self._worker * self._layout.payload_bytes[part.group]
        if at == 0:
            self._flat[begin : begin + slot * size] = 0
        return row, slot


class HalfABatch(Honest):
    def chosen(self, direction: Direction, pages: list[Page]) -> list[Page]:
        return pages[: -(-len(pages) // 2)]


class LastPage(Honest):
    """Leaves out one page of all."""

    def chosen(self, direction: Direction, pages: list[Page]) -> list[Page]:
        return pages[:-1]


class NextRow(Honest):
    """Counts rows from 1, in both directions."""

    def slot(self, part: GroupTransfer, at: int) -> tuple[int, int]:
        row, slot = super().slot(part, at)
        return row - 1 if row else row, slot


class FirstGroup(Honest):
    """Gives each group the first one's blocks."""

    def at_device(self, page: Page) -> torch.Tensor:
        first = self._layout.groups[0]
        is_there = page.tensor < len(first.tensors) and page.size <= first.page_bytes[page.tensor]
        return super().at_device(page._replace(group=0) if is_there else page)


class FirstWorker(Honest):
    """Fills the first worker's part of the rows, in both directions."""

    def at_row(self, page: Page) -> torch.Tensor:
        return super().at_row(
            page._replace(begin=page.begin - self._worker * self._layout.payload_bytes[page.group])
        )


class WholeWords(Honest):
    """Copies whole words of 8 bytes, and leaves what is behind the last one."""

    def copy(self, direction: Direction, page: Page) -> None:
        super().copy(direction, page._replace(size=page.size // 8 * 8))


class OneBit(Honest):
    """Flips the last bit of a load."""

    def copy(self, direction: Direction, page: Page) -> None:
        super().copy(direction, page)
        if direction is LOAD:
            self.at_device(page)[-1] ^= 1


class ChangesItsSource(Honest):
    """A store leaves zeros behind."""

    def copy(self, direction: Direction, page: Page) -> None:
        super().copy(direction, page)
        if direction is STORE:
            self.at_device(page)[0] ^= 255


class NoResult(Honest):
    def get_finished(self) -> list[TransferResult]:
        return []


class Fails(Honest):
    def get_finished(self) -> list[TransferResult]:
        found = super().get_finished()
        return [TransferResult(job_id=r.job_id, direction=r.direction, ok=False, error="no") for r in found]


TRUTHFUL = (Honest, CUDADevice)
LIARS = tuple(Honest.__subclasses__()) + tuple(LateWrite.__subclasses__())


class Scene:
    """An engine's KV memory and pool on the simulated GPU, of one seed."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.gpu = GPU(seed)
        self._copy_batch = self.gpu.copy_batch if seed % 2 else None
        self.factor = chance.randint(1, 3) if seed else 3
        far = torch.frombuffer(mmap.mmap(-1, _FAR_STEP * _FAR_BLOCKS), dtype=torch.uint8)
        self.kv = [
            [torch.full((200, 40), 7, dtype=torch.uint8)]
            + [torch.full((200, size + 32), 7, dtype=torch.uint8)[:, :size] for size in (24, 13, 64)],
            [far.as_strided((_FAR_BLOCKS, 24), (_FAR_STEP, 1))],
        ]
        if seed % 2:
            self.kv.reverse()
        self.layout = said_to_be_on_a_gpu(KVLayout(*self.kv, block_size_factor=self.factor))
        geometry = PoolGeometry(num_rows=400, row_bytes=row_bytes(self.layout, 2), num_workers=2)
        self.pool = Pool.create(geometry)

    @contextmanager
    def device(self, kind: type) -> Iterator[Device]:
        """A device of this kind, at work until the end; the pool can be closed then."""
        with self.gpu.installed():
            device = (
                CUDADevice(self.layout, self.pool, 1, copy_batch=self._copy_batch)
                if kind is CUDADevice
                else kind(self.layout, self.pool, 1, self.gpu)
            )
            try:
                yield device
            finally:
                assert device.shutdown(TIMEOUT_S)
        del device


def find_out(kind: type) -> str | None:
    """What the self-test says of a device of this kind; ``None`` when it passes in every scene."""
    for seed in range(TRIES):
        scene = Scene(seed)
        try:
            with scene.device(kind) as device:
                self_test(device, scene.layout, scene.pool, 1)
        except SelfTestError as error:
            return str(error)
    return None
