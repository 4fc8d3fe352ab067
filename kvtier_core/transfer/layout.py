"""The engine's KV memory as the device copies see it: tensors of pages, and where each page goes in a row.

Decides whether a set of tensors can be moved page by page. It never copies, and imports torch for its types
only.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class KVLayout:
    """The KV of one group: each tensor is viewable as ``(num_blocks, page_bytes)`` bytes, pages contiguous.

    The first dimension counts blocks and may be strided; the dtype is anything. One tensor that holds all
    layers of a block (block-major) moves fastest; a tensor per layer, and per K and V (layer-major), works
    too. A row's payload is the block's page of each tensor, in the order of the tensors given.
    """

    def __init__(self, tensors: Sequence["Tensor"]) -> None:
        """Keep the tensors, without a copy. Raises ``ValueError`` that names the tensor and what is wrong."""
        if not tensors:
            raise ValueError("a KV layout needs at least one tensor")
        self.tensors = tuple(tensors)
        self.device = self.tensors[0].device
        self.num_blocks = self.tensors[0].shape[0] if self.tensors[0].dim() else 0
        self.page_bytes = tuple(self._check(index, tensor) for index, tensor in enumerate(self.tensors))
        self.page_offsets = tuple(accumulate(self.page_bytes[:-1], initial=0))
        """Where each tensor's page begins in the payload, in bytes."""
        self.payload_bytes = sum(self.page_bytes)

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
            raise ValueError(f"{what}: a block's page must be contiguous, its strides are {tensor.stride()}")
        page_items = tensor.numel() // shape[0]
        if shape[0] > 1 and tensor.stride(0) < page_items:
            raise ValueError(f"{what}: its blocks overlap, its strides are {tensor.stride()}")
        return page_items * tensor.element_size()
