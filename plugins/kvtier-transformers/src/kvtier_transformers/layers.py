"""Finds out which KV a model keeps, and whether that of a prefix is the same whatever follows it.

Decides by what the model does with transformers' own cache on a few tokens, not by its name: the kind of each layer,
the shape of its K and V, and that tokens computed in pieces give what they give at once. A model whose KV of a prefix
depends on later tokens would be answered wrongly from a cache.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers import cache_utils as transformers_layers

from kvtier_transformers.compat import LAYER_WITHOUT_KV, cache_keyword
from kvtier_transformers.support import refuse

_TRIAL_TOKENS = 48
_NEAR = {torch.float64: 1e-5, torch.float32: 1e-5}
"""How far two ways to compute the same may be apart, over its own size. Other dtypes round more coarsely."""
_COARSELY_NEAR = 0.02
_IN_PIECES = 100
"""Times that, where shapes differ as well: a prompt at once, and in pieces or in a batch."""
_QUANTIZED = ("torch.ao.nn.quantized", "torch.nn.quantized")
"""Where torch rounds each activation by the largest of its batch: tokens that follow show, as rounding."""
_QUANTIZED_NEAR = 0.25


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """What one layer keeps of a token."""

    key_shape: tuple[int, int]
    """``(kv_heads, head_dim)`` of K. V may have others, as in latent attention."""
    value_shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    """How many tokens a query sees, itself included; all when unset."""


def read_layers(model: PreTrainedModel) -> list[LayerKV | None]:
    """What each layer of *model* keeps, ``None`` for one that keeps nothing and uses what another layer does.

    *model* is one that ``check_model`` has passed. Cost: three forward passes over 48 tokens, and two over parts.
    Raises ``UnsupportedModelError`` for layers that keep something else, by their name, and for a model whose KV
    depends on what follows, or that takes no cache.
    """
    tokens = trial_tokens(model, _TRIAL_TOKENS)
    at_once = _run(model, [tokens])
    found = [_layer_of(layer) for layer in at_once.layers]
    if objections := sorted({layer for layer in found if isinstance(layer, str)}):
        raise refuse(type(model).__name__, objections)
    known = len(tokens) - _num_new(at_once, len(tokens))
    caches = {
        "at once": at_once,
        "before others": _run(model, [[*tokens[:known], *tokens[known + 1 :], *tokens[known : known + 1]]]),
        "in pieces": _run(model, [tokens[: known // 2], tokens[known // 2 : known], tokens[known:]]),
    }
    if objections := list(_differences(model, caches, len(tokens) - known)):
        raise refuse(type(model).__name__, objections)
    return [layer for layer in found if not isinstance(layer, str)]


def check_batches(model: PreTrainedModel) -> None:
    """Raise ``UnsupportedModelError`` when KV depends on padding, or on the other sequences of a batch.

    Cost: three forward passes over 48 tokens or fewer.
    """
    tokens = trial_tokens(model, _TRIAL_TOKENS)
    padding = len(tokens) // 3
    prompts = [tokens, tokens[: len(tokens) - padding]]
    mask = torch.ones((2, len(tokens)), dtype=torch.long, device=model.device)
    mask[1, :padding] = 0
    options = {"attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    together = _prefix_kv(_run(model, [[tokens, tokens[:padding] + prompts[1]]], **options), 0)
    for number, prompt in enumerate(prompts):
        alone = _prefix_kv(_run(model, [prompt]), 0)
        counts = [min(one.shape[2], both.shape[2]) for one, both in zip(alone, together, strict=True)]
        expected = [tensor[:, :, -count:] for tensor, count in zip(alone, counts, strict=True)]
        found = [tensor[[number], :, -count:] for tensor, count in zip(together, counts, strict=True)]
        if not are_near(expected, found, _other_shapes(nearness(model, expected[0].dtype))):
            raise refuse(type(model).__name__, ["its KV in a batch is another than alone"])


def _num_new(cache: DynamicCache, num_tokens: int) -> int:
    """How many of the tokens to exchange: each layer still shows some that came before, a short window as well."""
    shown = [layer.keys.shape[2] for layer in cache.layers if layer.keys is not None]
    return min([num_tokens // 3, *(count // 2 for count in shown)])


def _differences(model: PreTrainedModel, caches: Mapping[str, DynamicCache], num_new: int) -> Iterator[str]:
    """Objections to KV of the same tokens that is not the same each time; the last *num_new* are others."""
    prefixes = {way: _prefix_kv(cache, num_new) for way, cache in caches.items()}
    if not prefixes["at once"]:
        yield "it keeps no KV in the cache it is given"
        return
    near = nearness(model, prefixes["at once"][0].dtype)
    far = _other_shapes(near)
    if not are_near(prefixes["at once"], prefixes["before others"], near):
        yield "its KV of a prefix depends on the tokens that follow"
    elif not are_near(prefixes["at once"], prefixes["in pieces"], far):
        yield "its KV depends on how a prompt is cut into pieces"


def _other_shapes(near: float) -> float:
    """*near* for the same tokens in tensors of other shapes."""
    return near * _IN_PIECES if near < _COARSELY_NEAR else near


def nearness(model: PreTrainedModel, dtype: torch.dtype) -> float:
    """How far two ways to compute the same may be apart in *model*, over its own size."""
    if any(type(module).__module__.startswith(_QUANTIZED) for module in model.modules()):
        return _QUANTIZED_NEAR
    return _NEAR.get(dtype, _COARSELY_NEAR)


def trial_tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Token ids that mean nothing special to the model, unless all do; as many as it has positions for, at most.

    Always the same ones.
    """
    config = model.config.get_text_config(decoder=True)
    special: set[int] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        found = getattr(config, name, None)
        special.update(found if isinstance(found, list | tuple) else () if found is None else (found,))
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = range(min(vocabulary, 1000))
    ordinary = [token for token in ids if token not in special] or ids
    count = min(count, getattr(config, "max_position_embeddings", None) or count)
    return [ordinary[index * index % len(ordinary)] for index in range(1, count + 1)]


def _run(model: PreTrainedModel, pieces: Sequence[Sequence[Any]], **options: torch.Tensor) -> DynamicCache:
    """Transformers' cache after the model has seen the *pieces*, one forward pass each: a sequence's, or a batch's."""
    try:
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            for piece in pieces:
                if piece:
                    token_ids = torch.tensor(piece, device=model.device)
                    token_ids = token_ids if token_ids.dim() > 1 else token_ids[None]
                    model(input_ids=token_ids, use_cache=True, **options, **{cache_keyword(model): cache})
    except Exception as error:
        raise refuse(
            type(model).__name__, [f"transformers' DynamicCache does not serve it: {error}"]
        ) from error
    return cache


def _prefix_kv(cache: DynamicCache, num_new: int) -> list[torch.Tensor]:
    """K and V of each layer without those of the last *num_new* tokens."""
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return [tensor[:, :, : tensor.shape[2] - num_new] for tensor in held]


def _layer_of(layer: object) -> LayerKV | str | None:
    """What a layer of transformers' cache holds, or the objection to it."""
    kind = type(layer)
    if kind is LAYER_WITHOUT_KV:
        return None
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if kind not in (transformers_layers.DynamicLayer, transformers_layers.DynamicSlidingWindowLayer):
        return f"it has layers whose state is a {kind.__name__}"
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor) or not keys.numel():
        return f"it has layers that leave their {kind.__name__} empty"
    if keys.dtype != values.dtype or keys.shape[0] != 1:
        shapes = [f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in (keys, values)]
        return f"it has layers whose K and V are {' and '.join(shapes)}"
    return LayerKV(
        key_shape=(keys.shape[1], keys.shape[3]),
        value_shape=(values.shape[1], values.shape[3]),
        dtype=keys.dtype,
        device=keys.device,
        window=getattr(layer, "sliding_window", None),
    )


def are_near(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor], near: float) -> bool:
    """Whether tensors differ by rounding alone."""
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        one, other = one.cpu(), other.cpu()  # noqa: PLW2901 - some accelerators have no double precision
        size = one.double().norm().clamp_min(1e-12)
        if one.shape != other.shape or not (one.double() - other.double()).norm() <= near * size:  # nor a NaN
            return False
    return True
