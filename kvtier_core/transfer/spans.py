"""A group's pages in host memory as few strided arrays: what lies at even distances moves in one numpy call.

An engine usually allocates its layers one after another, so that the same block of every layer is found at even
distances. One array over all of them leaves the loop over layers to numpy's own, which costs 10 ns a page instead of
500. Decides how pages are grouped; it never copies.

numpy takes two arrays for overlapping when one lies between the other's first and last byte, and then copies into a new
array first. That too may come to lie in there, and numpy copies again, until the stack is full. So no span reaches
across the memory that its pages are copied to and from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Span:
    """Pages of ``page_bytes`` that are ``steps`` apart: ``(count, distance)`` of each level, outermost first.

    ``address`` is that of block 0's first page; blocks are ``block_stride`` bytes apart.
    """

    address: int
    page_bytes: int
    block_stride: int
    steps: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one block: ``(..., page_bytes)``."""
        return (*(count for count, _ in self.steps), self.page_bytes)

    @property
    def num_pages(self) -> int:
        """Pages of one block."""
        product = 1
        for count, _ in self.steps:
            product *= count
        return product

    def view(self, num_blocks: int) -> _Bytes:
        """The memory as ``(num_blocks, ..., page_bytes)``. Whoever uses it keeps the memory alive.

        Built from bare addresses: no array of Python's spans several allocations. Every element that the shape reaches
        is a byte of some page.
        """
        strides = (self.block_stride, *(distance for _, distance in self.steps), 1)
        return np.asarray(_Memory((num_blocks, *self.shape), self.address, strides))


class _Memory:
    """What numpy needs to know to make an array of memory it does not own."""

    def __init__(self, shape: tuple[int, ...], address: int, strides: tuple[int, ...]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": shape,
            "data": (address, False),
            "strides": strides,
        }


def join(spans: Sequence[Span], around: int) -> list[Span]:
    """Join neighbours at even distances, twice over: K and V of every layer are two levels. Keeps the order.

    Pages on different sides of the address *around*, that of the memory on the other side of the copies, stay apart.
    """
    return _join(_join(spans, around), around)


def _join(spans: Sequence[Span], around: int) -> list[Span]:
    alike = groupby(
        spans, key=lambda span: (span.page_bytes, span.block_stride, span.steps, span.address < around)
    )
    return [joined for _, same in alike for joined in _join_alike(list(same))]


def _join_alike(spans: list[Span]) -> Iterator[Span]:
    """Cut spans of one shape into the longest evenly spaced pieces, from the front."""
    begin = 0
    while begin < len(spans):
        first = spans[begin]
        end = begin + 1
        distance = spans[end].address - first.address if end < len(spans) else 0
        while end < len(spans) and spans[end].address - spans[end - 1].address == distance:
            end += 1
        count = end - begin
        steps = first.steps if count == 1 else ((count, distance), *first.steps)
        yield Span(first.address, first.page_bytes, first.block_stride, steps)
        begin = end
