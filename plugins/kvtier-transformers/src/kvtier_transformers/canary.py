"""Proves at the start, with a few tokens, that what comes back from the pool is what the model had computed.

A proof of a block's bytes can't see an adapter that reads them wrongly: one that takes K for V in a layer, or one head
for another. The logits of the tokens that follow can.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from transformers import Cache, PreTrainedModel

from kvtier_core import Settings, UnsupportedModelError
from kvtier_transformers.cache import DeviceKV
from kvtier_transformers.cached_prompt import Prompt
from kvtier_transformers.compat import cache_keyword
from kvtier_transformers.layers import are_near, nearness, trial_tokens

_RESTORED = 32
"""Tokens that are restored, in whole blocks; one block in any case."""
_BEHIND = 3
"""Tokens computed behind them, no more than a block's."""
_ROOM = 4
"""The pool of the trial has so many times the room that its blocks take."""
_ROW_EXTRA = 8192
"""More than a row adds to a block: its proof, and the way to the next page."""

CacheFor = Callable[[Sequence[int]], AbstractContextManager[Prompt]]


def trial_settings(settings: Settings, kv: DeviceKV) -> Settings:
    """*settings* with a small pool of its own and no tiers: nothing of the trial stays."""
    pool = settings.pool.model_copy(
        update={
            "capacity": _ROOM * _num_blocks(kv) * (kv.block_bytes + _ROW_EXTRA),
            "prefault": False,
            "huge_pages": False,
            "store_threshold": 1,
        }
    )
    return replace(settings, pool=pool, tiers={}, tier_types={}, lookup_order=None)


def check_restores(model: PreTrainedModel, kv: DeviceKV, cache_for: CacheFor) -> None:
    """Raise ``UnsupportedModelError`` where a prompt's logits differ once its first blocks were loaded.

    *cache_for* is that of an engine on *kv* whose tiers are empty. The device's KV is zeros afterwards, as before.
    Cost: forward passes over 32 tokens, or a block, and twice over three more.
    """
    restored = kv.tokens_per_block * _num_blocks(kv)
    tokens = trial_tokens(model, restored + min(_BEHIND, kv.tokens_per_block))
    if len(tokens) <= restored or len(tokens) > kv.max_tokens:
        return  # no prompt is long enough for anything to be restored, or hardly any
    with cache_for(tokens) as prompt:
        _forward(model, tokens[:restored], prompt.cache)
        held = [tensor[:restored].clone() for tensor in kv.tensors]
        computed = _forward(model, tokens[restored:], prompt.cache)
        prompt.store(tokens)
    _clear(kv)
    with cache_for(tokens) as prompt:
        wrong = _what_is_wrong(model, tokens, restored, prompt, kv, held, computed)
    _clear(kv)
    if wrong is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not served: KV that was stored and loaded again is not what the model had"
            f" computed ({wrong}), so that answers would be wrong. Please report it, with the versions of transformers"
            " and kvtier-transformers. Engine.open(..., canary=False) leaves this check out"
        )


def _what_is_wrong(
    model: PreTrainedModel,
    tokens: Sequence[int],
    restored: int,
    prompt: Prompt,
    kv: DeviceKV,
    held: Sequence[torch.Tensor],
    computed: torch.Tensor,
) -> str | None:
    """What differs from the first run, which *held* this KV of the first tokens and *computed* logits behind them."""
    if prompt.hit_tokens != restored:
        return f"{prompt.hit_tokens} of {restored} tokens came back"
    others = [
        number
        for number, (tensor, before) in enumerate(zip(kv.tensors, held, strict=True))
        if not torch.equal(tensor[:restored].view(torch.uint8), before.view(torch.uint8))
    ]
    if others:
        return (
            f"other bytes came back in {len(others)} of {len(held)} tensors, the first one number {others[0]}"
        )
    again = _forward(model, tokens[restored:], prompt.cache)
    first, second = _not_ruled_out(computed), _not_ruled_out(again)
    if first.shape != second.shape:
        return f"of the logits behind {restored} tokens, {len(first)} are numbers, and then {len(second)}"
    if not are_near([first], [second], nearness(model, computed.dtype)):
        apart, size = (first - second).abs().max(), first.abs().max()
        return f"the logits behind {restored} tokens differ by up to {apart:.3g} of {size:.3g}"
    return None


def _not_ruled_out(logits: torch.Tensor) -> torch.Tensor:
    """Without infinities and the least number: by these models rule words out, and beside them nothing counts."""
    return logits[logits.isfinite() & (logits > torch.finfo(logits.dtype).min)]


def _num_blocks(kv: DeviceKV) -> int:
    return max(1, _RESTORED // kv.tokens_per_block)


def _forward(model: PreTrainedModel, tokens: Sequence[int], cache: Cache) -> torch.Tensor:
    """The model's logits for each of *tokens*, or its last hidden states where it has no head."""
    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor([tokens], device=model.device),
            use_cache=True,
            **{cache_keyword(model): cache},
        )
    states: torch.Tensor = output[0]
    return states


def _clear(kv: DeviceKV) -> None:
    for tensor in kv.tensors:
        tensor.zero_()
