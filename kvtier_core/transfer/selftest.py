"""Whether a device copies right, found out on the engine's own KV memory before anything is served.

Each round moves a few blocks of every group, a store and a load at the same time, right behind compute that is late.
The test makes the bytes itself, and reads and writes device memory with plain copies of torch's on the engine's stream.
So a mistake that a device makes in both directions is seen as well.

It relies on this: nobody else uses the KV memory meanwhile, and the pool is new. It uses this worker's share of the
rows alone, so all workers may test at once. Afterwards KV memory and rows hold what they held before.
"""

import random
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier_core.transfer.control import SCHEDULER
from kvtier_core.transfer.device import Device, TransferResult
from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.layout import KVLayout, Piece
from kvtier_core.transfer.plan import GroupTransfer
from kvtier_core.transfer.pool import Pool
from kvtier_core.transfer.rounds import SELF_TEST_JOBS, Parts, SelfTestError, plan_rounds

_SLEEP_CYCLES = 20_000_000
"""How long compute is late: about 10 ms, more than it takes to queue a round's writes."""
_PRODUCTS = 100
"""Of matrices of 1024 x 1024 numbers, where torch has no sleep: about 10 ms on an accelerator."""
_MARGIN = 4096
"""Bytes on either side of what is written that have to stay as they are."""
_SPREAD = 1 << 16
_GUARD = 0xA5
_TIMEOUT_S = 30.0

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class SelfTestReport:
    """A test that was passed: how long it took, and the speed of its largest transfer each way in bytes a second.

    ``is_pinned`` is None where copies cross to no other memory.
    """

    is_pinned: bool | None
    store_speed: float
    load_speed: float
    seconds: float

    def describe(self) -> str:
        """For a log line."""
        rows = {None: "", True: ", the pool is pinned", False: ", the pool is NOT pinned"}[self.is_pinned]
        return (
            f"stores {self.store_speed / 1e9:.1f} GB/s, loads {self.load_speed / 1e9:.1f} GB/s{rows}; the self-test "
            f"took {self.seconds:.2f} s"
        )


def self_test(device: Device, layout: KVLayout, pool: Pool, worker: int = 0) -> SelfTestReport:
    """Move test patterns through *device*, which is idle, and compare every byte.

    Uses ``SELF_TEST_JOBS`` job ids of each direction. Raises ``SelfTestError``; *device* is not to be used then.
    """
    if pool.control.has_come(SCHEDULER):
        raise SelfTestError(
            f"worker {worker} can't test {layout.device}: the scheduler may use the pool's rows already. Start the "
            "whole engine again"
        )
    geometry = pool.geometry
    share = range(*(geometry.num_rows * at // geometry.num_workers for at in (worker, worker + 1)))
    rounds = plan_rounds(layout, share, geometry.row_bytes)
    try:
        with torch.inference_mode():
            return _Trial(device, layout, pool, worker, share).run(rounds)
    except Exception as error:  # noqa: BLE001 - a device that raises has not passed
        wrong = str(error) if isinstance(error, SelfTestError) else f"{type(error).__name__}: {error}"
    # Raised out here: the other error's frames hold rows of the pool, which then could not be closed.
    raise SelfTestError(
        f"{layout.device} (worker {worker}) did not pass kvtier's self-test: {wrong}. Its KV would be wrong: run the "
        "engine without kvtier on this device, and report this line with the versions of driver and torch"
    )


class _Move(NamedTuple):
    """One device block, and where its bytes are in the flat pool."""

    direction: Direction
    group: int
    block: int
    pieces: tuple[Piece, ...]
    pattern: int
    """Where its bytes begin in the noise."""


class _KV:
    """The engine's KV memory, by plain copies of torch's that are queued where the engine queues its compute."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._is_queued = layout.device.type != "cpu"
        self._torch = getattr(torch, layout.device.type)
        longest = max(group.block_bytes for group in layout.groups)
        self.noise: _Bytes = np.random.default_rng(0).integers(0, 256, longest + _SPREAD, np.uint8)
        there = layout.groups[0].tensors[0].device
        self._matrices = []
        if self._is_queued and not hasattr(self._torch, "_sleep"):
            self._matrices = [torch.zeros(1024, 1024, device=there) for _ in range(3)]
        self._noise = torch.empty(len(self.noise), dtype=torch.uint8, device=there)
        self._buffer = torch.empty(longest, dtype=torch.uint8, device=there)
        with self._queue():
            self._noise.copy_(torch.from_numpy(self.noise))

    def _queue(self) -> AbstractContextManager[object]:
        if not self._is_queued:
            return nullcontext()  # compute on a CPU is over when it returns
        stream = self._torch.current_stream(self._layout.device)
        queue: AbstractContextManager[object] = self._torch.stream(stream)
        return queue

    def _pages(self, group: int, block: int, cut: slice) -> Iterator[torch.Tensor]:
        for tensor in self._layout.groups[group].tensors:
            yield tensor[block].reshape(-1).view(torch.uint8)[cut]

    def read(self, group: int, block: int, begin: int | None = None, end: int | None = None) -> _Bytes:
        """What the compute that was queued by now leaves in the block, of each page the bytes from *begin* to *end*."""
        cut = slice(begin, end)
        with self._queue():
            end = 0
            for page in self._pages(group, block, cut):
                begin, end = end, end + len(page)
                self._buffer[begin:end].copy_(page, non_blocking=True)
            found = torch.empty(end, dtype=torch.uint8)
            found.copy_(self._buffer[:end])
        content: _Bytes = found.numpy()
        return content

    def write(self, group: int, block: int, content: torch.Tensor) -> None:
        """Queue compute that writes a block. The host waits for none of it if *content* is on the device."""
        with self._queue():
            end = 0
            for page in self._pages(group, block, slice(None)):
                begin, end = end, end + len(page)
                page.copy_(content[begin:end], non_blocking=True)

    def write_noise(self, group: int, block: int, begin: int) -> None:
        """Queue compute that writes the noise from *begin* on."""
        self.write(group, block, self._noise[begin:])

    def be_late(self) -> None:
        """What is queued from now on takes its time to begin."""
        if not self._is_queued:
            return
        with self._queue():
            if not self._matrices:
                self._torch._sleep(_SLEEP_CYCLES)  # noqa: SLF001 - nothing public waits on a GPU
                return
            one, other, product = self._matrices
            for _ in range(_PRODUCTS):
                torch.mm(one, other, out=product)


class _Trial:
    """The rounds of one test."""

    def __init__(self, device: Device, layout: KVLayout, pool: Pool, worker: int, share: range) -> None:
        self._device, self._layout, self._worker = device, layout, worker
        self._kv = _KV(layout)
        self._first_job = {d: pool.control.get_last_announced(worker, d) + 1 for d in Direction}
        self._row_bytes = pool.geometry.row_bytes
        self._share = (share.start * self._row_bytes, share.stop * self._row_bytes)
        self._flat: _Bytes = pool.rows_array.reshape(-1)
        self._results: dict[tuple[Direction, int], TransferResult] = {}
        self._chance = random.Random(1)  # noqa: S311 - the same bytes at every start
        self._used_rows: list[tuple[int, int]] = []
        self._used_blocks: list[tuple[int, int, _Bytes]] = []
        """What each round used, and what it held before: a write that comes late is seen at the end."""

    def run(self, rounds: Sequence[Parts]) -> SelfTestReport:
        """All rounds; in the last one each direction has a turn of its own, against the clock."""
        begun = time.perf_counter()
        speeds: dict[Direction, float] = {}
        for number, parts in enumerate(rounds):
            both = list(Direction) if number % 2 else [*reversed(Direction)]
            turns = [[d] for d in Direction] if number == SELF_TEST_JOBS - 1 else [both]
            try:
                speeds = self._round(number, parts, turns)
            except SelfTestError as error:
                raise SelfTestError(f"in round {number + 1} of {SELF_TEST_JOBS}, {error}") from None
        self._look_again()
        first = self._layout.row_offset(0, self._worker) + self._layout.groups[0].page_offsets[0]
        own = range(first, len(self._flat), self._row_bytes)
        rows = [torch.from_numpy(self._flat[at : at + 1]) for at in (own[0], own[-1])]
        return SelfTestReport(
            is_pinned=None if self._layout.device.type == "cpu" else all(row.is_pinned() for row in rows),
            store_speed=speeds[Direction.STORE],
            load_speed=speeds[Direction.LOAD],
            seconds=time.perf_counter() - begun,
        )

    def _round(self, number: int, parts: Parts, turns: list[list[Direction]]) -> dict[Direction, float]:
        """One transfer of each direction, those of one turn at the same time. Bytes a second of each."""
        moves = {direction: self._moves(direction, parts[direction]) for direction in Direction}
        spots = [(move.group, move.block) for direction in Direction for move in moves[direction]]
        before = {spot: self._kv.read(*spot) for spot in spots}
        edges = {edge: self._kv.read(*edge) for edge in self._edges(spots)}
        images = self._fill_rows(moves)
        self._kv.be_late()
        for move in moves[Direction.STORE]:
            self._kv.write_noise(move.group, move.block, move.pattern)
        for move in moves[Direction.LOAD]:  # which must not come after the load
            self._kv.write_noise(move.group, move.block, (move.pattern + _SPREAD // 2) % _SPREAD)
        speeds = {}
        for turn in turns:
            begun = time.perf_counter()
            for direction in turn:
                self._device.submit(direction, self._first_job[direction] + number, parts[direction])
            for direction in turn:
                self._finish(direction, number)
                speeds[direction] = self._bytes(moves[direction]) / (time.perf_counter() - begun)
                if direction is Direction.STORE:
                    self._check_rows(images, moves)
                else:
                    self._check_blocks("after a load,", moves[direction])
        self._check_blocks("a store changed its source:", moves[Direction.STORE])
        for edge, content in edges.items():
            self._compare("what no transfer was to touch has changed:", self._kv.read(*edge), content, *edge)
        self._check_rows(images, moves)
        for begin, end in images:
            self._flat[begin:end] = 0
        for (group, block), content in before.items():
            self._kv.write(group, block, torch.from_numpy(content))
        self._used_rows += images
        self._used_blocks += [(*spot, content) for spot, content in before.items()]
        return speeds

    def _bytes(self, moves: Sequence[_Move]) -> int:
        return sum(self._layout.groups[move.group].block_bytes for move in moves)

    def _finish(self, direction: Direction, number: int) -> None:
        job = self._first_job[direction] + number
        if not self._device.wait(direction, [job], _TIMEOUT_S):
            raise SelfTestError(f"a {direction.value} did not end within {_TIMEOUT_S:g} s")
        self._results |= {(r.direction, r.job_id): r for r in self._device.get_finished()}
        result = self._results.pop((direction, job), None)
        if result is None or not result.ok:
            why = "it gave no result" if result is None else result.error or "it was dropped"
            raise SelfTestError(f"a {direction.value} failed: {why}")

    def _moves(self, direction: Direction, parts: Sequence[GroupTransfer]) -> list[_Move]:
        factor = self._layout.block_size_factor
        moves = []
        for part in parts:
            group = self._layout.groups[part.group]
            offset = self._layout.row_offset(part.group, self._worker)
            patterns = self._chance.sample(range(_SPREAD), len(part.block_ids))
            slots = enumerate(zip(part.block_ids, patterns, strict=True), part.first_slot)
            for at, (block, pattern) in slots:
                row, slot = part.rows[at // factor], at % factor
                begin = int(row * self._row_bytes + offset + slot * group.slot_bytes)
                pieces = tuple(piece._replace(place=begin + piece.place) for piece in group.pieces)
                moves.append(_Move(direction, part.group, int(block), pieces, pattern))
        return moves

    def _edges(self, spots: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int | None, int | None]]:
        """What lies right before and behind the pages of *spots*: a group, a block, and the stretch of its pages."""
        used = {block for _, block in spots}  # in any group, for groups may share memory
        for group, block in spots:
            if block - 1 >= 0 and block - 1 not in used:
                yield group, block - 1, -_MARGIN, None
            if block + 1 < self._layout.groups[group].num_blocks and block + 1 not in used:
                yield group, block + 1, None, _MARGIN

    def _fill_rows(self, moves: dict[Direction, list[_Move]]) -> dict[tuple[int, int], _Bytes]:
        """Write what the loads are to find, with guards around it and where stores will write.

        Returns what all that must be after both transfers: bytes of the flat pool from one place to another.
        """
        low, high = self._share
        edges: list[tuple[int, int]] = []
        for place, _, size in sorted(piece for some in moves.values() for m in some for piece in m.pieces):
            begin, end = max(low, place - _MARGIN), min(high, place + size + _MARGIN)
            if edges and begin < edges[-1][1]:  # one stretch with the piece before
                begin, _ = edges.pop()
            edges.append((begin, end))
        images = {(begin, end): np.full(end - begin, _GUARD, np.uint8) for begin, end in edges}
        for direction in (Direction.LOAD, Direction.STORE):
            for move in moves[direction]:
                for place, within, size in move.pieces:
                    edge = edges[bisect(edges, (place, high)) - 1]
                    noise = self._kv.noise[move.pattern + within :][:size]
                    images[edge][place - edge[0] :][:size] = noise
            if direction is Direction.LOAD:
                for (begin, end), image in images.items():
                    self._flat[begin:end] = image
        return images

    def _check_rows(self, images: dict[tuple[int, int], _Bytes], moves: dict[Direction, list[_Move]]) -> None:
        for (begin, end), image in images.items():
            found = self._flat[begin:end]
            if np.array_equal(found, image):
                continue
            first = int((found != image).argmax())
            at = begin + first
            row, byte = divmod(at, self._row_bytes)
            what = f"byte {byte} of row {row} is 0x{found[first]:02x} instead of 0x{image[first]:02x}"
            for move in (m for some in moves.values() for m in some):
                for place, within, size in move.pieces:
                    if place <= at < place + size:
                        belongs = self._place(move.group, move.block, within + at - place)
                        raise SelfTestError(
                            f"after a {move.direction.value}, {what}, where {belongs} belongs"
                        )
            raise SelfTestError(f"what no transfer was to touch has changed: {what}")

    def _check_blocks(self, when: str, moves: Sequence[_Move]) -> None:
        for move in moves:
            expected = self._kv.noise[move.pattern :][: self._layout.groups[move.group].block_bytes]
            self._compare(when, self._kv.read(move.group, move.block), expected, move.group, move.block)

    def _look_again(self) -> None:
        """Whether all that was used is as it was before."""
        for begin, end in self._used_rows:
            if self._flat[begin:end].any():
                at = begin + int(self._flat[begin:end].argmax())
                raise SelfTestError(f"row {at // self._row_bytes} was written after its transfer had ended")
        for group, block, content in self._used_blocks:
            when = "it was written after its transfer had ended:"
            self._compare(when, self._kv.read(group, block), content, group, block)

    def _compare(
        self,
        when: str,
        found: _Bytes,
        expected: _Bytes,
        group: int,
        block: int,
        begin: int | None = None,
        end: int | None = None,
    ) -> None:
        if np.array_equal(found, expected):
            return
        at = int((found != expected).argmax())
        place = self._place(group, block, at, slice(begin, end))
        raise SelfTestError(f"{when} {place} is 0x{found[at]:02x} instead of 0x{expected[at]:02x}")

    def _place(self, group: int, block: int, at: int, cut: slice = slice(None)) -> str:
        """Which byte of which page of a block the byte *at* is, where of each page only *cut* counts."""
        for tensor, size in enumerate(self._layout.groups[group].page_bytes):
            begin, end, _ = cut.indices(size)
            if at < end - begin:
                return f"byte {begin + at} of block {block}'s page in tensor {tensor} of KV group {group}"
            at -= end - begin
        raise AssertionError("a byte behind the last page")
