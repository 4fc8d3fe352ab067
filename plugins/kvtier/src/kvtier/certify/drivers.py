"""What an engine's distribution offers so that it can be certified (entry-point group ``kvtier.certify.v1``).

The entry point's name is the engine's; its target is a *driver*: a function that takes an ``Opening`` and returns an
``Engine``. A driver does only what any user of the engine can do. It runs in a process of its own, which may be killed.
Only that process imports it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Answer = tuple[NDArray[np.float32], Mapping[str, int]]
"""The natural logarithms of the next token's probabilities ``(vocab,)``, and the restored tokens by their source."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How an engine is opened. Every part of it goes through pickle."""

    model: Path
    max_tokens: int
    """The longest prompt that will be asked."""
    config: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """kvtier's settings that are stronger than the file *config*, as ``load_settings`` takes them."""
    has_kvtier: bool = True
    variant: str | None = None
    """The same model with something changed that its KV depends on: ``rope``, ``dtype``, ``weights`` or ``tp2``."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own options, as the user gave them."""
    workplace: Path
    """A directory in which the driver may write."""


class Engine(Protocol):
    """An open engine. ``tokens_per_block`` are those of kvtier's blocks, also where kvtier is left out."""

    tokens_per_block: int
    vocab_size: int
    dtype: str

    def ask(self, token_ids: Sequence[int], first: int = 0) -> Answer:
        """The probabilities of the token after *token_ids*.

        Without kvtier, the *first* tokens are computed by themselves before the others.
        """
        ...

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything computed so far is stored in all tiers; False when that takes longer."""
        ...

    def forget_device(self) -> None:
        """Drop the KV on the device. That in kvtier's pool and tiers stays."""
        ...

    def close(self) -> None:
        """End the engine in an orderly way."""
        ...


@runtime_checkable
class SupportsReset(Protocol):
    """An engine whose cache can be reset, kvtier included."""

    def reset(self) -> None:
        """Reset it, as after a change of weights."""
        ...


Driver = Callable[[Opening], Engine]
"""Opens the engine in this process, once.

Raises ``UnsupportedModelError`` where this engine, model or machine can't have the variant, else ``KvtierError``.
"""
