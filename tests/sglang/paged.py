"""A stand-in for SGLang's KV memory and its tree: pages whose bytes are a function of their names."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from kvtier_core.engine import GroupSpec, Namespace, open_parts
from kvtier_core.proof import row_bytes_for
from kvtier_core.settings import Settings, load_settings
from kvtier_core.transfer import KVLayout
from kvtier_sglang.cache import PageCache
from kvtier_sglang.pages import page_layout

TOKENS = 4
PAGES = 64
PATIENCE_S = 20.0
HERE = list(range(1, 11))
THERE = list(range(20, 30))
"""Numbers of ten pages each."""
ROW_BYTES = row_bytes_for(TOKENS * 16 * 4 * 6)


class Engine:
    """KV buffers of three layers, and a cache behind them."""

    def __init__(self, settings: Settings, weights: str = "w") -> None:
        self.buffers = [torch.zeros(PAGES * TOKENS, 2, 8) for _ in range(6)]
        self.cache = open_cache(settings, page_layout(self.buffers, TOKENS), weights)

    def write(self, names: Sequence[str], numbers: Sequence[int]) -> None:
        """Compute: fill the pages *numbers* with what their names stand for."""
        for name, number in zip(names, numbers, strict=True):
            for layer, buffer in enumerate(self.buffers):
                buffer[number * TOKENS : (number + 1) * TOKENS] = _content(name, layer)

    def holds(self, names: Sequence[str], numbers: Sequence[int]) -> bool:
        """Whether the pages *numbers* hold what their names stand for."""
        return all(
            torch.equal(buffer[number * TOKENS : (number + 1) * TOKENS], _content(name, layer))
            for name, number in zip(names, numbers, strict=True)
            for layer, buffer in enumerate(self.buffers)
        )

    def store(self, names: Sequence[str], numbers: Sequence[int]) -> bool:
        """Compute and offer the pages, and wait for the answer."""
        self.write(names, numbers)
        self.cache.store(names, numbers)
        while not self.cache.poll():
            pass
        return self.cache.pop_stored()

    def load(self, request: str, names: Sequence[str], numbers: Sequence[int]) -> int:
        """Look up and load: how many pages came. Fails where a byte of them is wrong."""
        found = self.cache.lookup(request, names)
        if not found or not self.cache.load(request, names[:found], numbers[:found]):
            return 0
        assert self.holds(names[:found], numbers[:found]), "wrong bytes"
        return found


def open_cache(settings: Settings, layout: KVLayout, weights: str = "w") -> PageCache:
    """A cache behind the memory that *layout* describes."""
    namespace = Namespace(
        model="toy",
        kv_dtype="float32",
        tokens_per_block=TOKENS,
        groups=(GroupSpec(layers=("all",), block_bytes=layout.payload_bytes[0]),),
        layout="toy",
        weights_digest=weights,
    )
    return PageCache(open_parts(settings, namespace, layout), TOKENS)


def open_with_disk(place: Path, *, rows: int = 64, on_reset: str = "all", weights: str = "w") -> Engine:
    """An engine with a pool of so many *rows*, and a disk tier in *place*."""
    file = place / "kvtier.toml"
    file.write_text(
        f'on_reset = "{on_reset}"\n[pool]\ncapacity = {rows * ROW_BYTES}\n'
        f'[tiers.disk]\ntype = "disk"\nroot = "{place}/tier"\ncapacity = "64MiB"\nmin_free = 0\n'
    )
    return Engine(load_settings(file=file, environ={}), weights)


def chain(prompt: str, count: int) -> list[str]:
    """The names of the first pages of a prompt, as SGLang makes them: digests, each of the one before."""
    names = [hashlib.sha256(prompt.encode()).hexdigest()]
    while len(names) < count:
        names.append(hashlib.sha256(names[-1].encode()).hexdigest())
    return names


def evict_pool(engine: Engine) -> None:
    """Push everything out of the pool, once the tiers have it."""
    assert engine.cache.flush(PATIENCE_S)
    for number in range(16):
        assert engine.store(chain(f"other {number}", 10), HERE)
        assert engine.cache.flush(PATIENCE_S)


def _content(name: str, layer: int) -> torch.Tensor:
    start = int(name[:6], 16) + 1000 * layer
    return torch.arange(start, start + TOKENS * 16, dtype=torch.float32).reshape(TOKENS, 2, 8)
