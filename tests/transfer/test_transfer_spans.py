"""Spans against the bytes at the addresses they stand for."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.transfer.cpu import Span, join

_PAGE = 3
_BLOCKS = 2


def _pages_of(spans: list[Span]) -> list[list[tuple[int, int]]]:
    """The address and the place in a slot of each page of each block, in order, worked out level by level."""
    found = []
    for block in range(_BLOCKS):
        pages = []
        for span in spans:
            these = [(span.address + block * span.block_stride, span.place)]
            for count, distance, apart in span.steps:
                these = [
                    (address + i * distance, place + i * apart)
                    for address, place in these
                    for i in range(count)
                ]
            pages += these
        found.append(pages)
    return found


@st.composite
def _singles(draw: st.DrawFn) -> list[Span]:
    gaps = draw(st.lists(st.integers(-2, 2), min_size=0, max_size=12))
    address, place, spans = 1000, 0, []
    for gap in [0, *gaps]:
        address += gap * 40
        place += draw(st.sampled_from([_PAGE, _PAGE, _PAGE, 9]))
        spans.append(Span(address, draw(st.sampled_from([_PAGE, _PAGE, _PAGE, 5])), 7, place))
    return spans


@given(_singles(), st.integers(600, 1400))
def test_joining_keeps_every_page_and_its_place(singles: list[Span], around: int) -> None:
    joined = join(singles, around)
    assert _pages_of(joined) == _pages_of(singles)
    assert sum(prod(span.shape[:-1]) for span in joined) == len(singles)
    assert [span.page_bytes for span in joined for _ in range(prod(span.shape[:-1]))] == [
        span.page_bytes for span in singles
    ]
    for span in joined:
        assert len({address < around for address, _ in _pages_of([span])[0]}) == 1, (
            "a span across the other side's memory"
        )


@given(st.integers(1, 40), st.integers(-500, 500))
def test_tensors_at_even_distances_become_one(count: int, distance: int) -> None:
    singles = [Span(100_000 + i * distance, _PAGE, 7, i * 5) for i in range(count)]
    (joined,) = join(singles, around=0)
    assert prod(joined.shape[:-1]) == count


def test_k_and_v_of_every_layer_become_one() -> None:
    singles = [
        Span(1000 * layer + 90 * kind, _PAGE, 7, 12 * layer + 6 * kind)
        for layer in range(5)
        for kind in range(2)
    ]
    assert join(singles, around=0) == [Span(0, _PAGE, 7, 0, ((5, 1000, 12), (2, 90, 6)))]


def test_c43_pages_at_other_distances_in_a_slot_stay_apart() -> None:
    singles = [Span(100 * i, _PAGE, 7, place) for i, place in enumerate((0, 3, 6, 20))]
    assert join(singles, around=0) == [Span(0, _PAGE, 7, 0, ((3, 100, 3),)), singles[-1]]


def test_blocks_at_other_distances_stay_apart() -> None:
    assert len(join([Span(100 * i, _PAGE, 7 + i, 3 * i) for i in range(3)], around=0)) == 3


def test_a_view_reads_and_writes_the_memory_it_stands_for() -> None:
    memory = np.arange(240, dtype=np.uint8)
    base = memory.ctypes.data
    (span,) = join(
        [Span(base + 200 - 90 * i, _PAGE, 10, 5 * i) for i in range(3)], around=0
    )  # falling addresses
    view = span.view(_BLOCKS)
    assert view.shape == (_BLOCKS, 3, _PAGE)
    assert view[1].tolist() == [[210, 211, 212], [120, 121, 122], [30, 31, 32]]
    view[1, 2] = 255
    assert memory[30:33].tolist() == [255, 255, 255]
    assert memory[33] == 33
    slots = np.zeros((4, 16), dtype=np.uint8)
    span.view_slots(slots)[2] = view[0]
    assert slots[2].tolist() == [200, 201, 202, 0, 0, 110, 111, 112, 0, 0, 20, 21, 22, 0, 0, 0]
    assert not slots[[0, 1, 3]].any()
