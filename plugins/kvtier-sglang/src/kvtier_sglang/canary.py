"""Proves at the start that what SGLang reads from a page after a load is what it had written before the store (C05).

The bytes go in and out by SGLang's own accessors, for which attention has no other way. So a layout that kvtier reads
otherwise is seen, which a proof of the bytes can't see.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch

from kvtier_core import UnsupportedModelError
from kvtier_sglang.cache import NamedBlocks, PageCache
from kvtier_sglang.memory import KVPart

_BLOCKS = 2
_STORED, _LOADED = (
    range(1, 1 + _BLOCKS),
    range(1 + _BLOCKS, 1 + 2 * _BLOCKS),
)  # SGLang gives block 0 to nobody
_TIMEOUT_S = 30.0


def check_blocks(cache: PageCache, parts: Sequence[KVPart]) -> None:
    """Store blocks of SGLang's KV memory, which is empty, and load them into others. They are zero afterwards.

    Raises ``UnsupportedModelError`` where they are not the same then.
    """
    buffers = [(part, buffer) for part in parts for buffer in part.read()]
    for part, buffer in buffers:
        needed = _LOADED.stop * part.slots
        if buffer.shape[0] < needed:
            option = "max_mamba_cache_size" if part.name == "mamba" else "max_total_tokens"
            raise UnsupportedModelError(
                f"kvtier needs {needed} slots to try its copies, and SGLang has {buffer.shape[0]} in its pool "
                f"{part.name!r}: set {option} higher"
            )
    with torch.inference_mode():
        for index, (part, buffer) in enumerate(buffers):
            slots = _slots(buffer, _STORED, part.slots)
            slots.copy_(_random(slots, index))
        same = _move(cache, _STORED, _LOADED, len(parts)) and all(
            torch.equal(_bytes(slots), _bytes(_random(slots, index)))
            for index, (part, buffer) in enumerate(buffers)
            for slots in [_slots(buffer, _LOADED, part.slots)]
        )
        for part, buffer in buffers:
            _slots(buffer, range(_STORED.start, _LOADED.stop), part.slots).zero_()
    _refuse_unless(is_same=same)


def check_host_pages(cache: PageCache, host_pool: Any) -> None:
    """As ``check_blocks`` for HiCache's *host_pool*, of which some pages may be taken: free ones are used.

    Raises ``UnsupportedModelError`` where they are not the same then, or too few are free.
    """
    tokens = host_pool.page_size
    slots = host_pool.alloc(2 * _BLOCKS * tokens)
    if slots is None:
        raise UnsupportedModelError(
            f"kvtier needs {2 * _BLOCKS} pages of HiCache's host memory to try its copies, and fewer are free: flush "
            "SGLang's cache, or set hicache_ratio or hicache_size higher"
        )
    firsts = slots[::tokens].tolist()
    pages = [first // tokens for first in firsts]
    try:
        patterns = [
            _random(host_pool.get_data_page(first), seed) for seed, first in enumerate(firsts[:_BLOCKS])
        ]
        for first, pattern in zip(firsts, patterns, strict=False):
            host_pool.set_from_flat_data_page(first, pattern)
        same = _move(cache, pages[:_BLOCKS], pages[_BLOCKS:]) and all(
            torch.equal(_bytes(host_pool.get_data_page(first)), _bytes(pattern))
            for first, pattern in zip(firsts[_BLOCKS:], patterns, strict=True)
        )
    finally:
        host_pool.free(slots)
    _refuse_unless(is_same=same)


def _refuse_unless(*, is_same: bool) -> None:
    if not is_same:
        raise UnsupportedModelError(
            "kvtier can't serve this SGLang: pages that were stored and loaded again are not what SGLang had written"
        )


def _slots(buffer: torch.Tensor, blocks: range, slots: int) -> torch.Tensor:
    """The part of *buffer* that *blocks* of so many *slots* have."""
    return buffer[blocks.start * slots : blocks.stop * slots]


def _random(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers in the shape of *like*, so that no layer, block or token is like another."""
    return torch.randint(120, like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _move(cache: PageCache, stored: Sequence[int], loaded: Sequence[int], num_groups: int = 1) -> bool:
    """Whether the blocks *stored* of each group were stored, and loaded as the blocks *loaded*."""
    names = [secrets.token_hex(32) for _ in range(_BLOCKS)]
    cache.store([NamedBlocks(names, stored, group) for group in range(num_groups)], store_tiers=())
    deadline = time.monotonic() + _TIMEOUT_S
    while not cache.poll() and time.monotonic() < deadline:
        time.sleep(0.001)
    loads = [NamedBlocks(names, loaded, group) for group in range(num_groups)]
    return cache.pop_stored() and cache.load("canary", loads)
