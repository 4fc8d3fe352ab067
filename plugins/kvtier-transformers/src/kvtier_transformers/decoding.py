"""Decoding in steps that the caller can see: prefill in chunks, then token by token.

Decides nothing about caches: it works on any transformers cache and calls back after every forward pass, so that the
engine and the plain baseline run the very same computation.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import Cache, PreTrainedModel

from kvtier_transformers.compat import cache_keyword, last_logits_only

Progress = Callable[[int], None]
"""Called after a forward pass with the number of tokens whose KV the cache now holds."""


class GreedyDecoder:
    """Runs one model over one cache. Not thread-safe; keeps nothing but the cache's length."""

    def __init__(
        self, model: PreTrainedModel, cache: Cache, *, chunk_tokens: int, on_progress: Progress
    ) -> None:
        self._model = model
        # Logits of the last position only: those of a whole chunk would be 100 MB for SmolLM2.
        self._options = {cache_keyword(model): cache, **last_logits_only(model)}
        self._length = cache.get_seq_length()
        self._chunk_tokens = chunk_tokens
        self._on_progress = on_progress

    def _forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([token_ids], device=self._model.device),
                use_cache=True,
                **self._options,
            )
        self._length += len(token_ids)
        self._on_progress(self._length)
        logits: torch.Tensor = output.logits[0, -1].float()  # (vocab,)
        return logits

    def prefill(self, prompt_ids: Sequence[int]) -> torch.Tensor:
        """Compute the KV of the prompt's tokens that the cache lacks; return the logits ``(vocab,)`` after the last.

        Raises ``ValueError`` when the cache leaves nothing to compute: the logits come from computing a token.
        """
        if self._length >= len(prompt_ids):
            raise ValueError(
                f"{self._length} tokens cached of {len(prompt_ids)}: one must be left to compute"
            )
        while True:
            logits = self._forward(prompt_ids[self._length : self._length + self._chunk_tokens])
            if self._length == len(prompt_ids):
                return logits

    def step(self, token_id: int) -> torch.Tensor:
        """Compute one more token; return the logits ``(vocab,)`` after it."""
        return self._forward([token_id])
