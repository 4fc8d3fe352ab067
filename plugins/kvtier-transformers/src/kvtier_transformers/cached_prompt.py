"""A prompt with a cache for callers who run the model themselves.

Decides whether a sequence may be stored: its keys must be those of the tokens whose KV the cache holds.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import Cache

from kvtier_transformers.token_log import CacheError, TokenLog


def flat_ids(ids: torch.Tensor | Sequence[int], what: str) -> Sequence[int]:
    """Token *ids* without the dimension of a batch. Raises ``CacheError`` for a batch of several."""
    if not isinstance(ids, torch.Tensor):
        return ids
    if ids.dim() > 1 and ids.shape[0] != 1:
        raise CacheError(
            f"a batch of {ids.shape[0]} {what}: kvtier's cache holds one sequence; run them one after another"
        )
    flat: list[int] = ids.reshape(-1).tolist()
    return flat


class Prompt:
    """A prompt whose cached prefix is loaded, for callers who run the model themselves.

    Made by ``Engine.cache_for``.
    """

    def __init__(
        self,
        cache: Cache,
        token_ids: tuple[int, ...],
        hit_tokens: int,
        log: TokenLog,
        store: Callable[[Sequence[int], int], None],
    ) -> None:
        """*log* has the tokens that went through *cache*.

        *store* is given the new tokens of the sequence, and how many of all have been computed.
        """
        self.cache = cache
        self.token_ids = token_ids
        self.hit_tokens = hit_tokens
        self._stored = token_ids
        self._log = log
        self._store = store

    def store(self, sequence: torch.Tensor | Sequence[int]) -> None:
        """Hand on the blocks of *sequence*: the prompt and what the model made of it. Returns when they are copied.

        The tokens must be those that went through ``cache``, in order; what the cache does not hold is left out.
        May be called again with a longer sequence. Raises ``CacheError`` when *sequence* does not begin with the prompt
        and with what was stored before, is shorter than what the cache holds, or has other tokens than went through the
        model, when a forward pass was cut off half way, or when the copies take too long.
        """
        flat = tuple(flat_ids(sequence, "sequences to store"))
        self._check(flat)
        known = len(self._stored)
        self._stored = flat
        self._store(flat[known:], min(len(flat), self.cache.get_seq_length()))

    def _check(self, flat: tuple[int, ...]) -> None:
        known, held = len(self._stored), self.cache.get_seq_length()
        if flat[:known] != self._stored:
            raise CacheError(
                "the sequence to store does not begin with the prompt this cache was made for"
                if known == len(self.token_ids)
                else f"the sequence to store does not begin with the {known} tokens stored before: take another cache "
                "for it"
            )
        if len({layer.get_seq_length() for layer in self.cache.layers if layer.keys is not None}) > 1:
            raise CacheError(
                "the layers hold different numbers of tokens: a forward pass was cut off half way, and what came after "
                "it can't be trusted"
            )
        computed = self._log.held(held)
        for position, (token, other) in enumerate(zip(flat, computed, strict=False)):
            if token != other:
                raise CacheError(
                    f"the sequence to store has token {token} at position {position}, and {other} went through the "
                    "model there: store what was computed, and feed the model what follows hit_tokens alone"
                )
        if held > len(flat):
            raise CacheError(
                f"the cache holds {held} tokens, the sequence to store has {len(flat)}: store all that went through "
                f"the model, or take the last away first, with cache.crop({len(flat) - held})"
            )
