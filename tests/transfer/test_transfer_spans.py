"""Spans against the bytes at the addresses they stand for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.transfer.cpu import Span, join

_PAGE = 3
_BLOCKS = 2


def _pages_of(spans: list[Span]) -> list[list[int]]:
    """The address of each page of each block, in order, worked out level by level."""
    found = []
    for block in range(_BLOCKS):
        addresses = []
        for span in spans:
            places = [span.address + block * span.block_stride]
            for count, distance in span.steps:
                places = [place + i * distance for place in places for i in range(count)]
            addresses += places
        found.append(addresses)
    return found


@st.composite
def _singles(draw: st.DrawFn) -> list[Span]:
    gaps = draw(st.lists(st.integers(-2, 2), min_size=0, max_size=12))
    address, spans = 1000, []
    for gap in [0, *gaps]:
        address += gap * 40
        spans.append(Span(address, draw(st.sampled_from([_PAGE, _PAGE, _PAGE, 5])), 7))
    return spans


@given(_singles(), st.integers(600, 1400))
def test_joining_keeps_every_page_and_its_place(singles: list[Span], around: int) -> None:
    joined = join(singles, around)
    assert _pages_of(joined) == _pages_of(singles)
    assert sum(span.num_pages for span in joined) == len(singles)
    assert [span.page_bytes for span in joined for _ in range(span.num_pages)] == [
        span.page_bytes for span in singles
    ]
    for span in joined:
        assert len({page < around for page in _pages_of([span])[0]}) == 1, (
            "a span across the other side's memory"
        )


@given(st.integers(1, 40), st.integers(-500, 500))
def test_tensors_at_even_distances_become_one(count: int, distance: int) -> None:
    singles = [Span(100_000 + i * distance, _PAGE, 7) for i in range(count)]
    (joined,) = join(singles, around=0)
    assert joined.num_pages == count


def test_k_and_v_of_every_layer_become_one() -> None:
    singles = [Span(1000 * layer + 90 * kind, _PAGE, 7) for layer in range(5) for kind in range(2)]
    assert join(singles, around=0) == [Span(0, _PAGE, 7, ((5, 1000), (2, 90)))]


def test_blocks_at_other_distances_stay_apart() -> None:
    assert len(join([Span(0, _PAGE, 7), Span(100, _PAGE, 8), Span(200, _PAGE, 9)], around=0)) == 3


def test_a_view_reads_and_writes_the_memory_it_stands_for() -> None:
    memory = np.arange(240, dtype=np.uint8)
    base = memory.ctypes.data
    (span,) = join([Span(base + 200 - 90 * i, _PAGE, 10) for i in range(3)], around=0)  # falling addresses
    view = span.view(_BLOCKS)
    assert view.shape == (_BLOCKS, 3, _PAGE)
    assert view[1].tolist() == [[210, 211, 212], [120, 121, 122], [30, 31, 32]]
    view[1, 2] = 255
    assert memory[30:33].tolist() == [255, 255, 255]
    assert memory[33] == 33
