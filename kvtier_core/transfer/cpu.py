"""The CPU device: the same interface as a GPU's, over tensors in host memory (C42).

It decides how pages travel: as few and as large copies as the ids and the tensors' places in memory allow, one thread
per direction. numpy copies, not torch: torch would share its threads with the engine, and a busy engine then slows
both. numpy lets the interpreter go on during a copy of more than 500 bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier_core.transfer.control import ControlPage
from kvtier_core.transfer.lanes import LaneDevice, worker_parts
from kvtier_core.transfer.layout import KVGroup, KVLayout
from kvtier_core.transfer.plan import Runs
from kvtier_core.transfer.pool import Pool
from kvtier_core.transfer.spans import Span, join

_Bytes = npt.NDArray[np.uint8]


class _Pair(NamedTuple):
    """The same pages on both sides."""

    pages: _Bytes  # (num_blocks, ..., page_bytes)
    slots: _Bytes  # (num_rows, factor, ..., page_bytes); at a factor of 1 (num_rows, ..., page_bytes)


_Indices = tuple[list[slice], Sequence[slice | tuple[int, slice]]]


class CPUDevice(LaneDevice):
    """Implements ``Device`` for tensors in host memory. See ``LaneDevice``.

    CPU compute is over when it returns; *compute_done* is for compute elsewhere.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: Pool,
        control: ControlPage,
        worker: int = 0,
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        """Raises ``ValueError``: tensors not in host memory, or what ``LaneDevice`` refuses."""
        if layout.device.type != "cpu":
            raise ValueError(f"the CPU device needs tensors in host memory, not on {layout.device}")
        parts = worker_parts(layout, pool, worker)
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
        super().__init__(layout, pool, control, worker, on_finished)

    def _store(self, plan: dict[int, Runs]) -> None:
        for group, runs in plan.items():
            blocks, places = self._indices(runs)
            for pages, slots in self._whole[group]:
                for block, place in zip(blocks, places, strict=True):
                    slots[place] = pages[block]

    def _load(self, plan: dict[int, Runs], reached: Callable[[int], None] | None) -> None:
        indices = {group: self._indices(runs) for group, runs in plan.items()}
        if reached is None:
            _fill(indices, self._whole)
            return
        for layer, pairs in self._by_layer.items():
            _fill(indices, pairs)
            reached(layer)

    def _let_go(self) -> None:
        self._whole.clear()
        self._by_layer.clear()

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


def _fill(indices: Mapping[int, _Indices], pairs: Sequence[Sequence[_Pair]]) -> None:
    for group, (blocks, places) in indices.items():
        for pages, slots in pairs[group]:
            for block, place in zip(blocks, places, strict=True):
                pages[block] = slots[place]


def _pair_up(group: KVGroup, slots: _Bytes, tensors: Sequence[int]) -> list[_Pair]:
    """Views of both sides for these tensors, neighbours in the row: as few as their addresses allow."""
    pairs = []
    offset = group.page_offsets[tensors[0]] if tensors else 0
    singles = [_span(group.tensors[i], group.page_bytes[i]) for i in tensors]
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
