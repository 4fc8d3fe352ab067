"""The CPU device: the same interface as a GPU's, over tensors in host memory (C42).

It decides how pages travel: as few and as large copies as the ids and the tensors' places in memory allow, and those of
a large transfer on several threads. numpy copies, not torch: torch would share its threads with the engine, and a busy
engine then slows both. numpy lets the interpreter go on during a copy of more than 500 bytes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier_core.transfer.helpers import Helpers
from kvtier_core.transfer.lanes import LaneDevice, worker_parts
from kvtier_core.transfer.layout import KVGroup, KVLayout
from kvtier_core.transfer.plan import Columns, Runs, share_out
from kvtier_core.transfer.pool import Pool
from kvtier_core.transfer.spans import Span, join

_SHARE_BYTES = 4 << 20
"""A thread is given about so much at least: less is copied by the time it has woken up."""
_COPY_THREADS = 2
"""One core moves 5.4 GB/s, two move 8.0 (``docs/benchmarks/transfer.md``); the engine needs the others."""
_CALL_BYTES = 16 << 10
"""In calls of fewer bytes, threads wait for the interpreter more than they copy."""

_Bytes = npt.NDArray[np.uint8]


class _Pair(NamedTuple):
    """The same pages on both sides."""

    pages: _Bytes  # (num_blocks, ..., page_bytes)
    slots: _Bytes  # (num_rows, factor, ..., page_bytes); at a factor of 1 (num_rows, ..., page_bytes)


_Some = int | slice
"""One of several, or a stretch of them: numpy takes half the time for the first."""
_Indices = tuple[Sequence[_Some], Sequence[_Some | tuple[int, _Some]]]


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
        copy_threads: int = _COPY_THREADS,
    ) -> None:
        """*copy_threads* share a transfer of 8 MiB and more, if it is of large pieces.

        They are no more than the processors that this thread may use. Raises ``ValueError``: tensors not in host
        memory, or what ``LaneDevice`` refuses.
        """
        if layout.device.type != "cpu":
            raise ValueError(f"the CPU device needs tensors in host memory, not on {layout.device}")
        parts = worker_parts(layout, pool, worker)
        self._pairs = [_pair_up(group, slots) for group, slots in zip(layout.groups, parts, strict=True)]
        threads = min(copy_threads, len(os.sched_getaffinity(0)))
        self._helpers = Helpers(threads - 1, f"kvtier-copy-{worker}")
        try:
            super().__init__(layout, pool, worker, on_finished)
        except BaseException:
            self._helpers.stop()
            raise

    def _store(self, plan: dict[int, Runs]) -> None:
        self._helpers.run([partial(_fill_slots, share, self._pairs) for share in self._shares(plan)])

    def _load(self, plan: dict[int, Runs]) -> None:
        self._helpers.run([partial(_fill_pages, share, self._pairs) for share in self._shares(plan)])

    def _let_go(self) -> None:
        self._helpers.stop()
        self._pairs.clear()

    def _shares(self, plan: dict[int, Runs]) -> list[dict[int, _Indices]]:
        """What each thread is to copy, of all groups and layers."""
        columns = {group: runs.tolist() for group, runs in plan.items()}
        calls = sum(len(runs[0]) * len(self._pairs[group]) for group, runs in columns.items())
        total = self._bytes(plan)
        count = min(self._helpers.count + 1, total // _SHARE_BYTES)
        if count <= 1 or total < calls * _CALL_BYTES:
            return [self._indices(columns)]
        sizes = [group.block_bytes for group in self._layout.groups]
        shares = share_out(columns, sizes, count, by_slot=self._limits.factor > 1)
        return [self._indices(share) for share in shares]

    def _indices(self, columns: Mapping[int, Columns]) -> dict[int, _Indices]:
        return {group: self._indices_of(runs) for group, runs in columns.items()}

    def _indices_of(self, runs: Columns) -> _Indices:
        """What to index ``_Pair.pages`` and ``_Pair.slots`` with, a run each."""
        blocks = [_some(block, length) for block, length in zip(runs[0], runs[3], strict=True)]
        if self._limits.factor == 1:
            return blocks, [_some(row, length) for row, length in zip(runs[1], runs[3], strict=True)]
        return blocks, [(row, _some(slot, length)) for row, slot, length in zip(*runs[1:], strict=True)]


def _some(first: int, length: int) -> _Some:
    return first if length == 1 else slice(first, first + length)


def _fill_slots(indices: Mapping[int, _Indices], pairs: Sequence[Sequence[_Pair]]) -> None:
    for group, (blocks, places) in indices.items():
        for pages, slots in pairs[group]:
            for block, place in zip(blocks, places, strict=True):
                slots[place] = pages[block]


def _fill_pages(indices: Mapping[int, _Indices], pairs: Sequence[Sequence[_Pair]]) -> None:
    for group, (blocks, places) in indices.items():
        for pages, slots in pairs[group]:
            for block, place in zip(blocks, places, strict=True):
                pages[block] = slots[place]


def _pair_up(group: KVGroup, slots: _Bytes) -> list[_Pair]:
    """Views of both sides, as few as the tensors' addresses allow."""
    pairs = []
    offset = 0
    singles = [_span(tensor, size) for tensor, size in zip(group.tensors, group.page_bytes, strict=True)]
    for span in join(singles, around=slots.ctypes.data):
        size = span.num_pages * span.page_bytes
        part = slots[..., offset : offset + size].reshape(*slots.shape[:-1], *span.shape)
        assert np.may_share_memory(part, slots), "a copy would be filled instead of the row"
        pairs.append(_Pair(span.view(group.num_blocks), part))
        offset += size
    return pairs


def _span(tensor: torch.Tensor, page_bytes: int) -> Span:
    # numpy has no bfloat16 or float8, and needs none: pages are contiguous bytes, as the layout checked.
    return Span(tensor.data_ptr(), page_bytes, tensor.stride(0) * tensor.element_size())
