"""Rows that do not depend on the tensor-parallel size: the place in a slot of each byte of a worker's pages.

A slot has, layer after layer, the page that one worker with all KV heads would have: vLLM's canonical page. vLLM gives
the place of a worker's own page in it, as runs of bytes. Decides which layers are certain, and whether the workers'
bytes fill a slot. Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalPageMapping

Spans = list[tuple[int, int]]
"""Each a begin and a number of bytes."""


class Fragment(NamedTuple):
    """Bytes that lie in one piece in a page, from *begin* on, and in a slot, from *place* on."""

    tensor: int
    """The number of vLLM's tensor that the page is in."""
    begin: int
    size: int
    place: int


def find_fragments(refs: Sequence[CanonicalKVCacheRef]) -> Iterator[Fragment]:
    """All fragments of a device block in one worker. The layers are certain."""
    page = 0
    for ref in refs:
        mapping = ref.mapping
        assert mapping is not None, "a layer that is not certain has no fragments"
        for begin, size, place in _walk(mapping):
            yield Fragment(ref.tensor_idx, begin, size, page + place)
        page += mapping.canonical_page_size_bytes


def find_uncertain(
    refs: Sequence[CanonicalKVCacheRef], layers: Sequence[str], copies: int, rank: int
) -> str | None:
    """The first layer whose bytes in a slot are not certain, or differ with the tensor-parallel size.

    *copies* neighbouring workers are known to hold the same bytes: those of latent attention. vLLM also takes the KV
    heads of several workers for the same, by the number in the model's configuration. A layer may have more heads than
    that (MiMo V2's windows). Its workers then hold different bytes, so such layers are not certain.
    """
    if len(refs) != len(layers):
        return next(iter(layers), None)  # vLLM hands all layers of a block as one page
    for layer, ref in zip(layers, refs, strict=True):
        mapping = ref.mapping
        if mapping is None or not mapping.parallelism_agnostic:
            return layer
        if (mapping.num_writers, mapping.writer_index) != (copies, rank % copies):
            return layer
        if not _tile(((begin, size) for begin, size, _ in _walk(mapping)), ref.page_size_bytes):
            return layer
    return None


def fill_a_slot(each: Sequence[Spans], copies: int, size: int) -> bool:
    """Whether the workers' spans, by rank, fill a slot of *size* bytes, whichever one of the *copies* writes it."""
    return all(_tile(chain.from_iterable(each[turn::copies]), size) for turn in range(copies))


def _tile(spans: Iterable[tuple[int, int]], size: int) -> bool:
    """Whether *spans* fill *size* bytes, without a gap and none of them twice."""
    edges = [(0, 0), *((begin, begin + length) for begin, length in sorted(spans)), (size, size)]
    return all(end == begin for (_, end), (begin, _) in pairwise(edges))


def _walk(mapping: CanonicalPageMapping) -> Iterator[tuple[int, int, int]]:
    """Of each fragment its begin in the worker's page, its bytes, and its begin in the canonical page."""
    for run in mapping.runs:
        for at in range(run.num_fragments):
            yield (
                run.local_offset + at * run.local_stride,
                run.fragment_size,
                run.canonical_offset + at * run.canonical_stride,
            )
