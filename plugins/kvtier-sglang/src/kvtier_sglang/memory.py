"""SGLang's KV memory by the components of its tree: what a block of each is, and which of SGLang's slots it has.

Attention over everything and sliding windows have pages of K and V, each in a pool of its own. A recurrent layer has
a state, which is kept after some tokens alone. To kvtier each is a KV group: of windows an end point needs the last
pages, of states the last one. Imports torch alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier_core import UnsupportedModelError
from kvtier_core.engine import GroupSpec
from kvtier_core.transfer import KVLayout
from kvtier_sglang.pages import as_pages, page_numbers

_STATE_WINDOW = 1
"""A state stands for all tokens before it: of states only the one after the last token is needed."""


@dataclass(frozen=True, kw_only=True)
class KVPart:
    """What one component of SGLang's tree keeps: the blocks of one KV group.

    ``name`` is SGLang's, in its transfers. ``tensors`` are ``(blocks, ...)`` each, and ``read`` gives what SGLang's
    layers read, ``(slots, ...)`` each, in the same order. ``window`` is in tokens.
    """

    name: str
    pool: Any
    tensors: Sequence[torch.Tensor]
    read: Callable[[], Sequence[torch.Tensor]]
    slots: int
    """Slots of a block."""
    window: int | None
    layers: str
    """Its layers in words: part of the namespace."""

    def blocks_of(self, slots: torch.Tensor) -> Sequence[int]:
        """The numbers of the blocks that *slots* make. Raises ``ValueError`` where they are not whole blocks."""
        return page_numbers(slots, self.slots)


def find_parts(params: Any, components: Iterable[str]) -> Sequence[KVPart]:
    """The parts of SGLang's KV memory, those of *components* of its tree, the one of full attention first.

    Raises ``UnsupportedModelError`` for KV of a kind that kvtier does not know.
    """
    names = set(components)
    if unknown := sorted(names - {"full", "swa", "mamba"}):
        raise UnsupportedModelError(
            f"kvtier can't serve this model: its layers have {', '.join(map(repr, unknown))} in SGLang's tree, and "
            "kvtier knows full attention, sliding windows and states"
        )
    kv_pool, tokens = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    parts = [_attention("kv", kv_pool, getattr(kv_pool, "full_kv_pool", kv_pool), tokens)]
    if "swa" in names:
        window = -(-params.swa_retain_window // tokens) * tokens  # SGLang asks for whole pages of it
        parts.append(_attention("swa", kv_pool, kv_pool.swa_kv_pool, tokens, window))
    if "mamba" in names:
        parts.append(_states(params.req_to_token_pool))
    return parts


def make_layout(parts: Iterable[KVPart]) -> KVLayout:
    """A KV group for each part."""
    return KVLayout(*(part.tensors for part in parts))


def describe_parts(parts: Sequence[KVPart]) -> Sequence[GroupSpec]:
    """The parts as kvtier's namespaces have them."""
    sizes = make_layout(parts).payload_bytes
    return [
        GroupSpec(layers=(part.layers,), block_bytes=size, window=part.window)
        for part, size in zip(parts, sizes, strict=True)
    ]


def find_side_states(requests: Any) -> Sequence[str]:
    """What SGLang keeps beside the states of its layers, each by its name."""
    kept = [
        name
        for name in ("ngram_pool", "short_conv_pool")
        if getattr(getattr(requests, name, None), "enabled", False)
    ]
    return [*kept, *(["mamba_ckpt_pool"] if getattr(requests, "mamba_ckpt_pool", None) is not None else [])]


def _attention(name: str, kv_pool: Any, pool: Any, tokens: int, window: int | None = None) -> KVPart:
    """Pages of the layers of *pool*, whose KV attention reads through *kv_pool*."""
    keys, values = getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", None)
    if not (keys and values and isinstance(keys[0], torch.Tensor)):
        raise UnsupportedModelError(
            f"kvtier can't serve this model in SGLang: its KV lies in a {type(pool).__name__}, and kvtier knows "
            "attention with K and V alone"
        )
    what = "full attention" if window is None else f"a window of {window} tokens"
    layer_ids = pool.model_layer_ids
    return KVPart(
        name=name,
        pool=pool,
        tensors=as_pages([*keys, *values], tokens),
        read=lambda: [
            *(kv_pool.get_key_buffer(layer) for layer in layer_ids),
            *(kv_pool.get_value_buffer(layer) for layer in layer_ids),
        ],
        slots=tokens,
        window=window,
        layers=f"{len(keys)} of {what}",
    )


def _states(requests: Any) -> KVPart:
    """The states of the recurrent layers: what their convolutions look back at, and what they remember."""
    pool = requests.mamba_pool
    kept = pool.mamba_cache
    kinds = [kind for kind in (*kept.conv, kept.temporal) if kind.numel()]  # (layers, slots, ...) each
    shapes = "; ".join(f"{tuple(kind.shape[2:])} {kind.dtype}" for kind in kinds)
    return KVPart(
        name="mamba",
        pool=pool,
        tensors=[kind[layer] for kind in kinds for layer in range(len(kind))],
        read=lambda: _read_states(requests, pool.mamba_layer_ids),
        slots=1,
        window=_STATE_WINDOW,
        layers=f"{len(pool.mamba_layer_ids)} with a state of {shapes}",
    )


def _read_states(requests: Any, layer_ids: Sequence[int]) -> Sequence[torch.Tensor]:
    by_layer = [requests.mamba2_layer_cache(layer) for layer in layer_ids]
    by_kind = zip(*([*layer.conv, layer.temporal] for layer in by_layer), strict=True)
    return [tensor for kind in by_kind for tensor in kind if tensor.numel()]
