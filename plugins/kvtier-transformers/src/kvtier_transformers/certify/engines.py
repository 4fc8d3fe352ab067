"""Transformers' engine with kvtier, and transformers alone, behind the few questions that ``kvtier certify`` asks.

Decides how a prompt is computed: with kvtier in one piece, alone in one or two.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from kvtier_core import load_settings
from kvtier_transformers.decoding import GreedyDecoder
from kvtier_transformers.engine import Engine
from kvtier_transformers.models import LoadedModel

Answer = tuple[NDArray[np.float32], Mapping[str, int]]


class _Described:
    """What both say of themselves."""

    def __init__(self, loaded: LoadedModel, opening: Any) -> None:
        self._model = loaded.model
        self._settings = load_settings(file=opening.config, overrides=opening.overrides)
        self.tokens_per_block = self._settings.pool.block_size
        self.vocab_size: int = loaded.model.get_input_embeddings().num_embeddings
        self.dtype = str(loaded.model.dtype).removeprefix("torch.")


class PlainEngine(_Described):
    """Transformers' own cache, empty at every question."""

    def ask(self, token_ids: Sequence[int], first: int = 0) -> Answer:
        """The log probabilities of the next token, the *first* tokens computed before the others."""
        decoder = GreedyDecoder(
            self._model,
            DynamicCache(config=self._model.config),
            chunk_tokens=len(token_ids),
            on_progress=lambda _: None,
        )
        if first:
            decoder.prefill(token_ids[:first])
        return _log_probabilities(decoder.prefill(token_ids)), {}

    def settle(self, timeout_s: float) -> bool:  # noqa: ARG002 - the interface's
        """There is nothing to wait for."""
        return True

    def forget_device(self) -> None:
        """It keeps nothing."""

    def close(self) -> None:
        """Nothing is open."""


class CertifiedEngine(_Described):
    """The engine with kvtier."""

    def __init__(self, loaded: LoadedModel, opening: Any) -> None:
        super().__init__(loaded, opening)
        self._engine = Engine.open(
            loaded.model,
            max_tokens=opening.max_tokens,
            config=self._settings,
            files=loaded.files,
            canary=False,  # what it would refuse at the start, certifying is to find in the answers
        )

    def ask(self, token_ids: Sequence[int], first: int = 0) -> Answer:  # noqa: ARG002 - the interface's
        """The log probabilities of the next token, and what was restored."""
        generation = self._engine.generate(token_ids, max_tokens=1)
        return _log_probabilities(generation.first_logits), dict(generation.hits_by_tier)

    def settle(self, timeout_s: float) -> bool:
        """Wait for the tiers."""
        return self._engine.flush(timeout_s)

    def forget_device(self) -> None:
        """The engine keeps nothing on the device from one prompt to the next."""

    def close(self) -> None:
        """Close engine, pool and tiers."""
        self._engine.close()


def _log_probabilities(logits: torch.Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = torch.log_softmax(logits.float(), dim=-1).cpu().numpy()  # (vocab,)
    return found
