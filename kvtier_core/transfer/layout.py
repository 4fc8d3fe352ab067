"""The engine's KV memory as the device copies see it: groups of paged tensors, and where each page goes in a row.

Decides whether tensors can be moved page by page, and the order of a row's bytes. Imports torch for its types only.

A row belongs to one group and has ``block_size_factor`` slots, one after another, each with the room of a device block:
the block's page of every tensor, in the order of the tensors. With several workers a row holds the workers' parts, each
laid out like this: one after another, or where the engine says. Or the workers share the slots: each page then has its
place there, between those of the others.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import index as to_index
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor


PROOF_BYTES = 64
"""A row's end, where no worker writes. ``kvtier_core.proof`` has the rest of a row's format (C03)."""


class Piece(NamedTuple):
    """*size* bytes of a device block, from *begin* on in its pages, that lie in one piece from *place* on in a slot."""

    place: int
    begin: int
    size: int


@dataclass(frozen=True, init=False, eq=False)
class KVGroup:
    """Layers that share one block table: each tensor is ``(num_blocks, ...)``, and a block's page in it contiguous.

    The blocks may be any distance apart, the dtype is anything. One tensor that holds all layers of a block
    (block-major) moves fastest. A tensor per layer, and per K and V (layer-major), works as well; tensors at even
    distances in memory move as one. Does not change.
    """

    tensors: "tuple[Tensor, ...]" = field(repr=False)
    device: "torch.device"
    num_blocks: int
    page_bytes: tuple[int, ...]
    """Bytes of a block's page in each tensor."""
    page_offsets: tuple[int, ...]
    """Where each tensor's page begins in a slot."""
    block_bytes: int
    """Bytes of one device block, all tensors."""
    slot_bytes: int
    """Bytes of a slot: as many, or more where other workers write between the pages."""
    pieces: tuple[Piece, ...]
    """A device block's bytes in a slot, as few pieces as they make; one where the pages follow one another."""

    def __init__(
        self,
        tensors: "Sequence[Tensor]",
        *,
        page_offsets: "Sequence[int] | None" = None,
        slot_bytes: int | None = None,
    ) -> None:
        """Keep the tensors, without a copy. Pages follow one another in a slot if no *page_offsets* are given.

        Raises ``ValueError`` that names the tensor and what is wrong, ``TypeError`` for what is no sequence of tensors.
        """
        if hasattr(tensors, "data_ptr"):
            raise TypeError("a KV group takes a sequence of tensors, not one tensor: [tensor]")
        held = tuple(tensors)
        if not held:
            raise ValueError("a KV group needs at least one tensor")
        for index, tensor in enumerate(held):
            if not hasattr(tensor, "data_ptr"):
                raise TypeError(f"KV tensor {index} is a {type(tensor).__name__}, not a tensor of torch's")
        first = held[0]
        num_blocks = first.shape[0] if first.dim() else 0
        page_bytes = tuple(
            _page_bytes(index, tensor, num_blocks, first.device) for index, tensor in enumerate(held)
        )
        begins = tuple(accumulate(page_bytes, initial=0))
        places = begins[:-1] if page_offsets is None else tuple(page_offsets)
        size = begins[-1] if slot_bytes is None else slot_bytes
        _refuse_other_places(places, page_bytes, size)
        self.__dict__.update(
            tensors=held,
            device=first.device,
            num_blocks=num_blocks,
            page_bytes=page_bytes,
            page_offsets=places,
            block_bytes=begins[-1],
            slot_bytes=size,
            pieces=_join(map(Piece, places, begins, page_bytes)),
        )

    def read_addresses(self) -> list[int]:
        """Where each tensor's memory is now. Cost: 0.1 us a tensor."""
        return [tensor.data_ptr() for tensor in self.tensors]


def _page_bytes(index: int, tensor: "Tensor", num_blocks: int, device: "torch.device") -> int:
    """The bytes of one page of *tensor*."""
    shape = tuple(tensor.shape)
    what = f"KV tensor {index} (shape {shape}, {tensor.dtype}, {tensor.device})"
    if not shape or tensor.numel() == 0:
        raise ValueError(f"{what} holds no blocks")
    if shape[0] != num_blocks:
        raise ValueError(f"{what} has {shape[0]} blocks, the first tensor {num_blocks}")
    if tensor.device != device:
        raise ValueError(f"{what} is not on {device} like the first tensor")
    if not tensor[0].is_contiguous():
        raise ValueError(
            f"{what}: a block's page must be contiguous, its strides are {tensor.stride()}: give a view for each "
            "contiguous piece of a page"
        )
    page_items = tensor.numel() // shape[0]
    if shape[0] > 1 and tensor.stride(0) < page_items:
        raise ValueError(f"{what}: its blocks overlap, its strides are {tensor.stride()}")
    return page_items * tensor.element_size()


def _refuse_other_places(places: tuple[int, ...], page_bytes: tuple[int, ...], slot_bytes: int) -> None:
    """Each page must have a place of its own within the slot."""
    if len(places) != len(page_bytes):
        raise ValueError(f"{len(page_bytes)} KV tensors need a page offset each, not {len(places)}")
    spans = sorted(
        (place, place + size, index)
        for index, (place, size) in enumerate(zip(places, page_bytes, strict=True))
    )
    for (_, end, one), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise ValueError(f"the pages of KV tensors {one} and {other} overlap in a slot, at byte {begin}")
    if spans[0][0] < 0 or spans[-1][1] > slot_bytes:
        raise ValueError(
            f"pages from byte {spans[0][0]} to {spans[-1][1]} are not within a slot of {slot_bytes} bytes"
        )


def _join(pieces: "Iterable[Piece]") -> tuple[Piece, ...]:
    """Neighbours as one."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and piece.place == joined[-1].place + joined[-1].size:
            last = joined.pop()
            joined.append(last._replace(size=last.size + piece.size))
        else:
            joined.append(piece)
    return tuple(joined)


@dataclass(frozen=True, init=False, eq=False)
class KVLayout:
    """All of an engine's KV on one device: its groups, and how many device blocks make a block. Does not change."""

    groups: tuple[KVGroup, ...]
    block_size_factor: int
    device: "torch.device"
    payload_bytes: tuple[int, ...]
    """Bytes of all slots of a row (of one worker's part of it), by group."""
    row_offsets: tuple[int, ...] | None
    """Where this worker's part begins in a row, by group; ``None`` where the workers' parts follow one another, all of
    one size."""

    def __init__(
        self,
        *groups: "KVGroup | Sequence[Tensor]",
        block_size_factor: int = 1,
        row_offsets: "Sequence[int] | None" = None,
    ) -> None:
        """One argument a group, a sequence of tensors standing for ``KVGroup`` of them.

        Raises ``ValueError`` when there is no group, they are on several devices, the factor is below 1, or not every
        group has an offset, ``TypeError`` when the factor is no whole number.
        """
        if isinstance(block_size_factor, bool) or not hasattr(block_size_factor, "__index__"):
            raise TypeError(f"block_size_factor must be a whole number, not {block_size_factor!r}")
        factor = to_index(block_size_factor)
        if not groups or factor < 1:
            raise ValueError(
                f"a KV layout needs at least one group and a factor of at least 1, not {len(groups)} and {factor}"
            )
        if row_offsets is not None and (len(row_offsets) != len(groups) or min(row_offsets) < 0):
            raise ValueError(
                f"{len(groups)} KV groups need an offset in a row each, not {tuple(row_offsets)}"
            )
        made = tuple(group if isinstance(group, KVGroup) else KVGroup(group) for group in groups)
        for index, group in enumerate(made):
            if group.device != made[0].device:
                raise ValueError(f"KV group {index} is on {group.device}, the first one on {made[0].device}")
        self.__dict__.update(
            groups=made,
            block_size_factor=factor,
            device=made[0].device,
            payload_bytes=tuple(group.slot_bytes * factor for group in made),
            row_offsets=None if row_offsets is None else tuple(row_offsets),
        )

    def row_offset(self, group: int, worker: int) -> int:
        """Where the part of this layout's *worker* begins in a row of *group*."""
        if self.row_offsets is None:
            return worker * self.payload_bytes[group]
        return self.row_offsets[group]
