"""The CPU device: the same interface as a GPU's, over tensors in host memory (C42).

It decides how pages travel: as few and as large copies as the ids and the tensors' places in memory allow, and those of
a large transfer on two threads. numpy copies, not torch: torch would share its threads with the engine, and a busy
engine then slows both. numpy lets the interpreter go on during a copy of more than 500 bytes.

An engine usually allocates its layers one after another, so that the same block of every layer is found at even
distances. One strided array (a ``Span``) over all of them leaves the loop over layers to numpy, which costs 10 ns a
page instead of 500.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.lanes import Copies, LaneDevice, Outcome, worker_parts
from kvtier_core.transfer.layout import KVGroup, KVLayout
from kvtier_core.transfer.plan import GroupTransfer, Runs, copy_parts
from kvtier_core.transfer.pool import Pool

_SHARED_BYTES = 8 << 20
"""A transfer of fewer is through by the time a second thread has woken up. One core moves 5.4 GB/s, two move 8.0
(``docs/benchmarks/transfer.md``); the engine needs the others."""
_CALL_BYTES = 16 << 10
"""In calls of fewer bytes, threads wait for the interpreter more than they copy."""
_PIECE_BYTES = 1 << 20
"""Most of one call, so that two threads end at the same time; a block is not cut."""

_Bytes = npt.NDArray[np.uint8]


class _Pair(NamedTuple):
    """The same pages on both sides."""

    pages: _Bytes  # (num_blocks, ..., page_bytes)
    slots: _Bytes  # (num_rows, factor, ..., page_bytes); at a factor of 1 (num_rows, ..., page_bytes)


_Index = int | slice | tuple[int, int | slice]
"""One of several, or a stretch of them: numpy takes half the time for the first."""
_Copy = tuple[_Bytes, _Index, _Bytes, _Index]
"""What becomes what: an array and the place in it, twice."""


class CPUDevice(LaneDevice):
    """Implements ``Device`` for tensors in host memory. See ``LaneDevice``.

    Compute on a CPU is over when it returns, so a transfer waits for none.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: Pool,
        worker: int = 0,
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        """Raises ``ValueError``: tensors not in host memory, or what ``LaneDevice`` refuses."""
        if layout.device.type != "cpu":
            raise ValueError(f"the CPU device needs tensors in host memory, not on {layout.device}")
        parts = worker_parts(layout, pool, worker)
        self._pairs = [_pair_up(group, slots) for group, slots in zip(layout.groups, parts, strict=True)]
        self._helper = ThreadPoolExecutor(1, f"kvtier-copy-{worker}")
        self._helper.submit(int)  # starts its thread: better refused now than in the middle of a copy
        super().__init__(layout, pool, worker, on_finished)

    def _begin(self, direction: Direction, parts: Sequence[GroupTransfer]) -> Copies:
        return Copies(partial(self._carry_out, direction, copy_parts(parts)))

    def _carry_out(self, direction: Direction, parts: Sequence[GroupTransfer]) -> Outcome:
        if self._is_stopping:
            return Outcome(dropped=True)
        begun = time.perf_counter()
        plan = self._plan(direction, parts)
        self._copy(direction, plan)
        return Outcome(bytes=self._bytes(plan), seconds=time.perf_counter() - begun)

    def _copy(self, direction: Direction, plan: dict[int, Runs]) -> None:
        copies = deque(self._copies(direction, plan))
        helping = self._helper.submit(_carry_out, copies) if self._is_shared(plan, len(copies)) else None
        try:
            _carry_out(copies)
        finally:
            copies.clear()
            # One that has not begun is not waited for: it may be busy with another transfer.
            if helping is not None and not helping.cancel():
                wait([helping])
        try:
            if helping is not None and not helping.cancelled():
                helping.result()
        finally:
            del helping  # an error whose frames refer to it would stay, and so would all that they refer to

    def _let_go(self) -> None:
        self._helper.shutdown()
        self._pairs.clear()

    def _is_shared(self, plan: dict[int, Runs], calls: int) -> bool:
        """Whether it is worth two threads, and there are two processors for them."""
        total = self._bytes(plan)
        return total >= max(_SHARED_BYTES, calls * _CALL_BYTES) and len(os.sched_getaffinity(0)) > 1

    def _copies(self, direction: Direction, plan: dict[int, Runs]) -> Iterator[_Copy]:
        for group, runs in plan.items():
            blocks, places = self._indices(
                runs, max(1, _PIECE_BYTES // self._layout.groups[group].block_bytes)
            )
            for pages, slots in self._pairs[group]:
                if direction is Direction.STORE:
                    yield from zip(repeat(slots), places, repeat(pages), blocks)
                else:
                    yield from zip(repeat(pages), blocks, repeat(slots), places)

    def _indices(self, runs: Runs, most: int) -> tuple[Sequence[_Index], Sequence[_Index]]:
        """The indices into ``_Pair.pages`` and ``_Pair.slots``, of at most so many device blocks each."""
        factor = self._limits.factor
        if int(runs[3].max()) > most:
            runs = _cut(runs, most, 1 if factor == 1 else 2)
        first_blocks, rows, slots, lengths = runs.tolist()
        blocks = [_some(block, length) for block, length in zip(first_blocks, lengths, strict=True)]
        if factor == 1:
            return blocks, [_some(row, length) for row, length in zip(rows, lengths, strict=True)]
        return blocks, [
            (row, _some(slot, length)) for row, slot, length in zip(rows, slots, lengths, strict=True)
        ]


def _carry_out(copies: deque[_Copy]) -> None:
    """Do one copy after the other until none is left. Several threads may."""
    with suppress(IndexError):
        while True:
            target, place, source, origin = copies.popleft()
            target[place] = source[origin]


def _cut(runs: Runs, most: int, place: int) -> Runs:
    """Runs of at most so many device blocks; *place* is the column that counts with them."""
    pieces = -(-runs[3] // most)
    done = (np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    runs = np.repeat(runs, pieces, axis=1)
    runs[[0, place]] += done
    runs[3] = np.minimum(runs[3] - done, most)
    return runs


def _some(first: int, length: int) -> int | slice:
    return first if length == 1 else slice(first, first + length)


def _pair_up(group: KVGroup, slots: _Bytes) -> list[_Pair]:
    """Views of both sides, as few as the tensors' addresses allow."""
    # numpy has no bfloat16 or float8, and needs none: pages are contiguous bytes, as the layout checked.
    singles = [
        Span(tensor.data_ptr(), size, tensor.stride(0) * tensor.element_size(), place)
        for tensor, size, place in zip(group.tensors, group.page_bytes, group.page_offsets, strict=True)
    ]
    spans = join(singles, around=slots.ctypes.data)
    return [_Pair(span.view(group.num_blocks), span.view_slots(slots)) for span in spans]


@dataclass(frozen=True)
class Span:
    """Pages of ``page_bytes`` that are ``steps`` apart: count, distance in memory and in a slot, outermost level first.

    ``address`` is that of block 0's first page, ``place`` where that is in a slot; blocks are ``block_stride`` bytes
    apart.
    """

    address: int
    page_bytes: int
    block_stride: int
    place: int
    steps: tuple[tuple[int, int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one block: ``(..., page_bytes)``."""
        return (*(count for count, _, _ in self.steps), self.page_bytes)

    def view(self, num_blocks: int) -> _Bytes:
        """The memory as ``(num_blocks, ..., page_bytes)``; the caller keeps it alive.

        Built from bare addresses: no array of Python's spans several allocations. Every element that the shape reaches
        is a byte of some page.
        """
        strides = (self.block_stride, *(distance for _, distance, _ in self.steps), 1)
        return np.asarray(_Memory((num_blocks, *self.shape), self.address, strides))

    def view_slots(self, slots: _Bytes) -> _Bytes:
        """The pages' places in *slots*, which are ``(..., slot_bytes)``: ``(..., *shape)``."""
        strides = (*slots.strides[:-1], *(distance for _, _, distance in self.steps), 1)
        return as_strided(slots[..., self.place :], (*slots.shape[:-1], *self.shape), strides)


class _Memory:
    """How numpy is told of memory it does not own."""

    def __init__(self, shape: tuple[int, ...], address: int, strides: tuple[int, ...]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": shape,
            "data": (address, False),
            "strides": strides,
        }


def join(spans: Sequence[Span], around: int) -> list[Span]:
    """Join neighbours at even distances on both sides, twice over: K and V of every layer are two levels.

    Keeps the order.

    Pages on different sides of the address *around*, that of the memory on the other side of the copies, stay apart.
    numpy takes two arrays for overlapping when one lies between the other's first and last byte. It then copies into a
    new array first, which may come to lie in there, and so on until the stack is full.
    """
    for _ in range(2):
        alike = groupby(spans, key=lambda s: (s.page_bytes, s.block_stride, s.steps, s.address < around))
        spans = [joined for _, same in alike for joined in _join_alike(list(same))]
    return list(spans)


def _join_alike(spans: list[Span]) -> Iterator[Span]:
    """Cut spans of one shape into the longest evenly spaced pieces, from the front."""
    begin = 0
    while begin < len(spans):
        first = spans[begin]
        end = begin + 1
        distance = _distance(first, spans[end]) if end < len(spans) else (0, 0)
        while end < len(spans) and _distance(spans[end - 1], spans[end]) == distance:
            end += 1
        count = end - begin
        yield first if count == 1 else replace(first, steps=((count, *distance), *first.steps))
        begin = end


def _distance(one: Span, other: Span) -> tuple[int, int]:
    """In memory, and in a slot."""
    return other.address - one.address, other.place - one.place
