"""The engine's KV memory as the device copies see it: groups of paged tensors, and where each page goes in a row.

Decides whether tensors can be moved page by page, and the order of a row's bytes. It never copies, and imports torch
for its types only.

A row belongs to one group and holds ``block_size_factor`` device blocks of it, one after another; each is the block's
page of every tensor, in the order of the tensors. With several workers a row holds the workers' parts one after
another, each laid out like this.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class KVGroup:
    """Layers that share one block table: each tensor is ``(num_blocks, ...)``, and a block's page in it contiguous.

    The blocks may be any distance apart, the dtype is anything. One tensor that holds all layers of a block
    (block-major) moves fastest; a tensor per layer, and per K and V (layer-major), works too, and tensors at even
    distances in memory move as one.
    """

    def __init__(self, tensors: Sequence["Tensor"], layers: Sequence[int] | None = None) -> None:
        """Keep the tensors, without a copy.

        *layers* says which layer each tensor belongs to, in rising order; by default each is a layer of its own.
        Raises ``ValueError`` that names the tensor and what is wrong.
        """
        if not tensors:
            raise ValueError("a KV group needs at least one tensor")
        self.tensors = tuple(tensors)
        self.layers = tuple(range(len(self.tensors))) if layers is None else tuple(layers)
        if len(self.layers) != len(self.tensors) or list(self.layers) != sorted(self.layers):
            raise ValueError(
                f"{len(self.tensors)} KV tensors need as many layer numbers, in rising order, not {self.layers}"
            )
        self.device = self.tensors[0].device
        self.num_blocks = self.tensors[0].shape[0] if self.tensors[0].dim() else 0
        self.page_bytes = tuple(self._check(index, tensor) for index, tensor in enumerate(self.tensors))
        self.page_offsets = tuple(accumulate(self.page_bytes[:-1], initial=0))
        """Where each tensor's page begins in a device block's bytes."""
        self.block_bytes = sum(self.page_bytes)
        """Bytes of one device block, all tensors."""

    def _check(self, index: int, tensor: "Tensor") -> int:
        """The bytes of one page of *tensor*."""
        shape = tuple(tensor.shape)
        what = f"KV tensor {index} (shape {shape}, {tensor.dtype}, {tensor.device})"
        if not shape or tensor.numel() == 0:
            raise ValueError(f"{what} holds no blocks")
        if shape[0] != self.num_blocks:
            raise ValueError(f"{what} has {shape[0]} blocks, the first tensor {self.num_blocks}")
        if tensor.device != self.device:
            raise ValueError(f"{what} is not on {self.device} like the first tensor")
        if not tensor[0].is_contiguous():
            raise ValueError(
                f"{what}: a block's page must be contiguous, its strides are {tensor.stride()}; split_pages makes "
                "pages of it"
            )
        page_items = tensor.numel() // shape[0]
        if shape[0] > 1 and tensor.stride(0) < page_items:
            raise ValueError(f"{what}: its blocks overlap, its strides are {tensor.stride()}")
        return page_items * tensor.element_size()


class KVLayout:
    """All of an engine's KV on one device: its groups, and how many device blocks make a block."""

    def __init__(self, *groups: "KVGroup | Sequence[Tensor]", block_size_factor: int = 1) -> None:
        """One argument a group, a sequence of tensors standing for ``KVGroup`` of them.

        Raises ``ValueError`` when there is no group, they are on several devices, or the factor is below 1.
        """
        if not groups or block_size_factor < 1:
            raise ValueError(
                f"a KV layout needs at least one group and a factor of at least 1, not {len(groups)} and "
                f"{block_size_factor}"
            )
        self.groups = tuple(group if isinstance(group, KVGroup) else KVGroup(group) for group in groups)
        self.block_size_factor = block_size_factor
        self.device = self.groups[0].device
        for index, group in enumerate(self.groups):
            if group.device != self.device:
                raise ValueError(f"KV group {index} is on {group.device}, the first one on {self.device}")
        self.payload_bytes = tuple(group.block_bytes * block_size_factor for group in self.groups)
        """Bytes of one block (one worker's part of a row), by group."""


def split_pages(tensor: "Tensor", block_dim: int = 0) -> "list[Tensor]":
    """The pages of a tensor of any dimension order, as tensors that ``KVGroup`` takes; memory is shared.

    *block_dim* counts blocks. The dimensions of a page are put in the order they have in memory, since bytes have no
    other; where a page is in several pieces (K and V, or layers, far apart), each piece is a tensor of its own.
    """
    blocks_first = tensor.movedim(block_dim, 0)
    strides = blocks_first.stride()
    inner = sorted(range(1, len(strides)), key=lambda dim: -strides[dim])
    return _split(blocks_first.permute(0, *inner))


def _split(tensor: "Tensor") -> "list[Tensor]":
    if tensor.dim() == 1 or tensor[0].is_contiguous():
        return [tensor]
    return [page for piece in tensor.unbind(1) for page in _split(piece)]
