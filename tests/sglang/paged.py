"""A stand-in for SGLang's KV memory and its tree: blocks whose bytes are a function of their names.

There is full attention, and as a test wants windows of three pages, and states.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from kvtier_core.engine import GroupSpec, Namespace, open_parts
from kvtier_core.proof import row_bytes_for
from kvtier_core.settings import Settings, load_settings
from kvtier_core.transfer import KVLayout
from kvtier_sglang.cache import NamedBlocks, PageCache
from kvtier_sglang.memory import KVPart, describe_parts, make_layout
from kvtier_sglang.pages import as_pages

TOKENS = 4
PAGES = 64
WINDOW = 3
"""Pages of a window."""
PATIENCE_S = 20.0
HERE = list(range(1, 11))
THERE = list(range(20, 30))
"""Numbers of ten pages each."""
ROW_BYTES = row_bytes_for(TOKENS * 16 * 4 * 6)


def _part(name: str, num_buffers: int, slots: int, window: int | None = None) -> KVPart:
    buffers = [torch.zeros(PAGES * slots, 2, 8) for _ in range(num_buffers)]
    return KVPart(
        name=name,
        pool=None,
        tensors=as_pages(buffers, slots),
        read=lambda: buffers,
        slots=slots,
        window=window,
        layers=f"{num_buffers} of {name}",
    )


def make_parts(components: Sequence[str]) -> Sequence[KVPart]:
    """The parts of a KV memory with these components: three layers of attention each, or a layer with a state."""
    made = {
        "full": lambda: _part("kv", 6, TOKENS),
        "swa": lambda: _part("swa", 4, TOKENS, WINDOW * TOKENS),
        "mamba": lambda: _part("mamba", 1, 1, 1),
    }
    return [made[component]() for component in components]


class Engine:
    """KV memory, and a cache behind it."""

    def __init__(self, settings: Settings, components: Sequence[str] = ("full",), weights: str = "w") -> None:
        self.parts = make_parts(components)
        groups = describe_parts(self.parts)
        self.cache = open_cache(settings, make_layout(self.parts), weights, groups=groups)

    def write(self, blocks: Sequence[NamedBlocks]) -> None:
        """Compute: fill *blocks* with what their names stand for."""
        for slots, content in self._each(blocks):
            slots.copy_(content)

    def holds(self, blocks: Sequence[NamedBlocks]) -> bool:
        """Whether *blocks* hold what their names stand for."""
        return all(torch.equal(slots, content) for slots, content in self._each(blocks))

    def store(self, names: Sequence[str], numbers: Sequence[int]) -> bool:
        """Compute and offer pages, and wait for the answer. Other components keep a block for each."""
        return self.store_blocks([NamedBlocks(names, numbers, group) for group in range(len(self.parts))])

    def store_blocks(self, blocks: Sequence[NamedBlocks]) -> bool:
        """Compute and offer *blocks*, and wait for the answer."""
        self.write(blocks)
        self.cache.store(blocks)
        while not self.cache.poll():
            pass
        return self.cache.pop_stored()

    def load(self, request: str, names: Sequence[str], numbers: Sequence[int]) -> int:
        """Look up and load as SGLang does: how many pages came. Fails where a byte of them is wrong."""
        found = max(self.cache.lookup(request, names), default=0)
        blocks = self.needed(names[:found], numbers[:found])
        if not found or not self.cache.load(request, blocks):
            return 0
        assert self.holds(blocks), "wrong bytes"
        return found

    def needed(self, names: Sequence[str], numbers: Sequence[int]) -> Sequence[NamedBlocks]:
        """What SGLang asks for where it restores *names*: all pages, the windows' last ones, and the last state."""
        last = {"kv": len(names), "swa": WINDOW, "mamba": 1}
        return [
            NamedBlocks(names[-last[part.name] :], numbers[-last[part.name] :], group)
            for group, part in enumerate(self.parts)
        ]

    def _each(self, blocks: Sequence[NamedBlocks]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The slots of each block in each buffer, and what its name stands for there."""
        for named in blocks:
            part = self.parts[named.group]
            for name, number in zip(named.names, named.numbers, strict=True):
                for layer, buffer in enumerate(part.read()):
                    slots = buffer[number * part.slots : (number + 1) * part.slots]
                    yield slots, _content(name, 10 * named.group + layer, slots)


def open_cache(
    settings: Settings, layout: KVLayout, weights: str = "w", *, groups: Sequence[GroupSpec] = ()
) -> PageCache:
    """A cache behind the memory that *layout* describes, whose *groups* are of full attention if not said."""
    full = GroupSpec(layers=("all",), block_bytes=layout.payload_bytes[0])
    namespace = Namespace(
        model="toy",
        kv_dtype="float32",
        tokens_per_block=TOKENS,
        groups=tuple(groups or [full]),
        layout="toy",
        weights_digest=weights,
    )
    return PageCache(open_parts(settings, namespace, layout), TOKENS)


def open_with_disk(
    place: Path,
    *components: str,
    rows: int = 64,
    on_reset: str = "all",
    weights: str = "w",
) -> Engine:
    """An engine with *components*, or full attention alone, a pool of so many *rows*, and a disk tier in *place*."""
    file = place / "kvtier.toml"
    file.write_text(
        f'on_reset = "{on_reset}"\n[pool]\ncapacity = {rows * ROW_BYTES}\n'
        f'[tiers.disk]\ntype = "disk"\nroot = "{place}/tier"\ncapacity = "64MiB"\nmin_free = 0\n'
    )
    return Engine(load_settings(file=file, environ={}), components or ("full",), weights)


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


def _content(name: str, layer: int, slots: torch.Tensor) -> torch.Tensor:
    start = int(name[:6], 16) + 1000 * layer
    return torch.arange(start, start + slots.numel(), dtype=torch.float32).reshape(slots.shape)
