"""Which tokens' KV a cache holds, seen as they go through the model: what a caller says of them is checked against it.

Decides whether a forward pass over the cache computes the KV that its token ids stand for. One that does not, since it
has positions or a mask of its own, no ids, or another model, is refused before anything is written.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kvtier_core import KvtierError

_POSITIONS = ("position_ids", "cache_position")


class CacheError(KvtierError, ValueError):
    """The cache was used for what it can't hold: several sequences, too many tokens, another dtype, gradients.

    Or for KV that is not that of its token ids.
    """


class TokenLog:
    """The tokens of one cache, in order. ``watch`` a model, or every write is refused."""

    def __init__(self, loaded: Sequence[int]) -> None:
        """*loaded* are the tokens whose KV the cache holds from the start."""
        self._token_ids = list(loaded)
        self._announced: list[int] | None = None

    def held(self, count: int) -> Sequence[int]:
        """The first *count* tokens, which is how many the cache holds."""
        return self._token_ids[:count]

    def written(self, begin: int, count: int) -> None:
        """A forward pass writes *count* tokens' KV from position *begin* on, over what was there.

        Raises ``CacheError`` when it is none that was announced.
        """
        announced, self._announced = self._announced, None
        if announced is None or len(announced) != count:
            raise CacheError(
                f"{count} tokens came past the model that the engine was opened with: call that model, and no other, "
                "with this cache"
            )
        self._token_ids[begin:] = announced

    @contextmanager
    def watch(self, model: PreTrainedModel, cache: Cache) -> Iterator[None]:
        """Learn the tokens of every forward pass of *model* over *cache*, until the ``with`` block ends."""
        # Most models call their base model; OPT calls the decoder inside it. The outer of two calls has the token ids.
        signatures = {
            inner: inspect.signature(inner.forward) for inner in {model.base_model, model.get_decoder()}
        }
        depth = 0

        def before_forward(inner: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal depth
            depth += 1
            given = signatures[inner].bind_partial(*args).arguments | kwargs
            is_ours = given.get("cache", given.get("past_key_values")) is cache
            if depth == 1 and is_ours:
                self._announced = _token_ids_of(given, cache.get_seq_length())

        def after_forward(*_: Any) -> None:
            nonlocal depth
            depth -= 1

        with ExitStack() as hooks:
            for inner in signatures:
                hooks.enter_context(inner.register_forward_pre_hook(before_forward, with_kwargs=True))
                hooks.enter_context(inner.register_forward_hook(after_forward, always_call=True))
            yield


def _token_ids_of(given: dict[str, Any], held: int) -> list[int]:
    """The tokens of a forward pass with these arguments, over a cache that holds *held* tokens."""
    token_ids = given.get("input_ids")
    if not isinstance(token_ids, torch.Tensor):
        raise CacheError(
            "the model was called with inputs_embeds: a prompt's KV is known by its token ids, so pass input_ids"
        )
    if token_ids.shape != (1, token_ids.shape[-1]):
        raise CacheError(
            f"input_ids of shape {tuple(token_ids.shape)}: kvtier's cache holds one sequence; run the sequences one "
            "after another"
        )
    flat: list[int] = token_ids[0].tolist()
    expected = list(range(held, held + len(flat)))
    for name in _POSITIONS:
        positions = given.get(name)
        if positions is not None and positions.reshape(-1).tolist() != expected:
            raise CacheError(
                f"the cache holds {held} tokens, so the next have the positions {held} to {expected[-1]}, and {name} "
                f"says otherwise (it begins with {positions.reshape(-1)[:3].tolist()}). Assisted generation and "
                "use_cache=False compute loaded tokens again: generate without them"
            )
    mask = given.get("attention_mask")
    if mask is not None and not (
        isinstance(mask, torch.Tensor) and mask.shape == (1, mask.shape[-1]) and bool(mask.all())
    ):
        raise CacheError(
            "attention_mask hides tokens, or is no row of ones: a prompt's KV is known by all of its token ids, so "
            "pass none"
        )
    return flat
