"""The driver with which ``kvtier certify`` runs llama.cpp, with kvtier and alone."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_core import ConfigError, UnsupportedModelError, load_settings
from kvtier_llamacpp.context import Context
from kvtier_llamacpp.engine import Engine
from kvtier_llamacpp.model import Model

Answer = tuple[NDArray[np.float32], Mapping[str, int]]


def open_engine(opening: Any) -> "CertifiedEngine | PlainEngine":
    """An engine as ``kvtier certify`` wants it: *opening* is its ``Opening``.

    Raises ``ConfigError`` for options, ``UnsupportedModelError`` for a variant, and as ``Engine.open`` does.
    """
    if opening.engine_options:
        raise ConfigError(f"--engine-options: llama.cpp takes none, not {', '.join(opening.engine_options)}")
    if opening.variant is not None:
        raise UnsupportedModelError("a GGUF file is run as it is")
    return CertifiedEngine(opening) if opening.has_kvtier else PlainEngine(opening)


class PlainEngine:
    """llama.cpp, empty at every question."""

    dtype = "float16"

    def __init__(self, opening: Any) -> None:
        settings = load_settings(file=opening.config, overrides=opening.overrides)
        self.tokens_per_block = settings.pool.block_size
        self._model = Model(opening.model)
        self._context = Context(
            self._model,
            num_tokens=opening.max_tokens,
            tokens_per_block=self.tokens_per_block,
            threads=len(os.sched_getaffinity(0)),
            flash_attention=True,
        )
        self.vocab_size = self._model.vocab_size

    def ask(self, token_ids: Sequence[int], first: int = 0) -> Answer:
        """The log probabilities of the next token, the *first* tokens computed before the others."""
        self._context.clear()
        if first:
            self._context.decode(token_ids[:first])
        return _log_probabilities(self._context.decode(token_ids[first:])), {}

    def settle(self, timeout_s: float) -> bool:  # noqa: ARG002 - the interface's
        """There is nothing to wait for."""
        return True

    def forget_device(self) -> None:
        """It keeps nothing."""

    def close(self) -> None:
        """Give the model's memory back."""
        self._context.close()
        self._model.close()


class CertifiedEngine:
    """The engine with kvtier."""

    dtype = "float16"

    def __init__(self, opening: Any) -> None:
        settings = load_settings(file=opening.config, overrides=opening.overrides)
        self._engine = Engine.open(opening.model, max_tokens=opening.max_tokens, config=settings)
        self.tokens_per_block = self._engine.tokens_per_block
        self.vocab_size = self._engine.vocab_size

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


def _log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max()
    found: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum())
    return found
