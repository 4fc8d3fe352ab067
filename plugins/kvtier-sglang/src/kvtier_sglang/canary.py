"""Proves at the start that what SGLang reads from a page after a load is what it had written before the store (C05).

The bytes go in and out by SGLang's own accessors, for which attention has no other way. So a layout that kvtier reads
otherwise is seen, which a proof of the bytes can't see.
"""

import secrets
import time
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
        moved = _move(cache, stored, loaded, tokens_per_page)
        same = moved and all(
            torch.equal(_bytes(buffer[loaded.start : loaded.stop]), _bytes(_pattern(buffer, size, index)))
            for index, buffer in enumerate(buffers)
        )
        for buffer in buffers:
            buffer[stored.start : loaded.stop] = 0
    if not same:
        raise UnsupportedModelError(
            "kvtier can't serve this SGLang: pages that were stored and loaded again are not what SGLang had written"
        )


def _pattern(buffer: torch.Tensor, size: int, index: int) -> torch.Tensor:
    """Numbers ``(size, ...)`` that differ from token to token, and from buffer to buffer."""
    shape = (size, *buffer.shape[1:])
    numbers = torch.arange(size * buffer[0].numel(), device=buffer.device)
    return ((7 * numbers + 31 * index) % 120).reshape(shape).to(buffer.dtype)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _move(cache: PageCache, stored: range, loaded: range, tokens_per_page: int) -> bool:
    names = [secrets.token_hex(32) for _ in range(_PAGES)]
    numbers = [slots.start // tokens_per_page + page for slots in (stored, loaded) for page in range(_PAGES)]
    cache.store(names, numbers[:_PAGES], store_tiers=())
    deadline = time.monotonic() + _TIMEOUT_S
    while not cache.poll() and time.monotonic() < deadline:
        time.sleep(0.001)
    return cache.pop_stored() and cache.load("canary", names, numbers[_PAGES:])
