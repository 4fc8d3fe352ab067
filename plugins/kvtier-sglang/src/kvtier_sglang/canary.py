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
from kvtier_sglang.cache import PageCache

_PAGES = 2
_TIMEOUT_S = 30.0


def check_pages(cache: PageCache, kv_pool: Any, tokens_per_page: int) -> None:
    """Store pages of SGLang's *kv_pool*, which is empty, and load them into others. They are zero afterwards.

    Raises ``UnsupportedModelError`` where they are not the same then.
    """
    first = tokens_per_page  # SGLang gives page 0 to nobody
    size = _PAGES * tokens_per_page
    stored, loaded = range(first, first + size), range(first + size, first + 2 * size)
    buffers = [
        buffer
        for layer in kv_pool.model_layer_ids
        for buffer in (kv_pool.get_key_buffer(layer), kv_pool.get_value_buffer(layer))
    ]
    if buffers[0].shape[0] < loaded.stop:
        raise UnsupportedModelError(
            f"kvtier needs {loaded.stop} token slots to try its copies, and SGLang has {buffers[0].shape[0]}: set "
            "max_total_tokens higher"
        )
    with torch.inference_mode():
        for index, buffer in enumerate(buffers):
            buffer[stored.start : stored.stop] = _pattern(buffer, size, index)
        same = _move(cache, range(1, 1 + 2 * _PAGES)) and all(
            torch.equal(_bytes(buffer[loaded.start : loaded.stop]), _bytes(_pattern(buffer, size, index)))
            for index, buffer in enumerate(buffers)
        )
        for buffer in buffers:
            buffer[stored.start : loaded.stop] = 0
    _refuse_unless(is_same=same)


def check_host_pages(cache: PageCache, host_pool: Any) -> None:
    """As ``check_pages`` for HiCache's *host_pool*, of which some pages may be taken: free ones are used.

    Raises ``UnsupportedModelError`` where they are not the same then, or too few are free.
    """
    tokens = host_pool.page_size
    slots = host_pool.alloc(2 * _PAGES * tokens)
    if slots is None:
        raise UnsupportedModelError(
            f"kvtier needs {2 * _PAGES} pages of HiCache's host memory to try its copies, and fewer are free: flush "
            "SGLang's cache, or set hicache_ratio or hicache_size higher"
        )
    firsts = slots[::tokens].tolist()
    stored, loaded = firsts[:_PAGES], firsts[_PAGES:]
    try:
        patterns = [_random(host_pool.get_data_page(first), seed) for seed, first in enumerate(stored)]
        for first, pattern in zip(stored, patterns, strict=True):
            host_pool.set_from_flat_data_page(first, pattern)
        same = _move(cache, [first // tokens for first in firsts]) and all(
            torch.equal(_bytes(host_pool.get_data_page(first)), _bytes(pattern))
            for first, pattern in zip(loaded, patterns, strict=True)
        )
    finally:
        host_pool.free(slots)
    _refuse_unless(is_same=same)


def _refuse_unless(*, is_same: bool) -> None:
    if not is_same:
        raise UnsupportedModelError(
            "kvtier can't serve this SGLang: pages that were stored and loaded again are not what SGLang had written"
        )


def _pattern(buffer: torch.Tensor, size: int, index: int) -> torch.Tensor:
    """Numbers ``(size, ...)`` that differ from token to token, and from buffer to buffer."""
    shape = (size, *buffer.shape[1:])
    numbers = torch.arange(size * buffer[0].numel(), device=buffer.device)
    return ((7 * numbers + 31 * index) % 120).reshape(shape).to(buffer.dtype)


def _random(page: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers in *page*'s shape, so that no layer or token is like another."""
    return torch.randint(120, page.shape, generator=torch.Generator().manual_seed(seed)).to(page.dtype)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _move(cache: PageCache, numbers: Sequence[int]) -> bool:
    """Whether the first pages of *numbers* were stored, and loaded as the others."""
    names = [secrets.token_hex(32) for _ in range(_PAGES)]
    cache.store(names, numbers[:_PAGES], store_tiers=())
    deadline = time.monotonic() + _TIMEOUT_S
    while not cache.poll() and time.monotonic() < deadline:
        time.sleep(0.001)
    return cache.pop_stored() and cache.load("canary", names, numbers[_PAGES:])
