"""How a command finds an engine, and what an engine offers to ``kvtier run`` and ``kvtier serve``.

An engine's distribution has an entry point by the engine's name. In the group ``kvtier.engines.v1`` its target is a
function that takes a path and returns a ``Model``. Only the chosen engine's package is imported.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from kvtier_core import KvtierError, Settings
from kvtier_core.engine import Generation
from kvtier_core.errors import PluginError
from kvtier_core.plugins.discovery import CERTIFY_GROUP, ENGINE_GROUP, Offer, find_offers, pick, usable_names
from kvtier_core.suggest import did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FLUSH_TIMEOUT_S = 300.0
_OUR_DISTRIBUTIONS = {
    CERTIFY_GROUP: {
        "llama.cpp": "kvtier-llamacpp",
        "sglang": "kvtier-sglang",
        "transformers": "kvtier-transformers",
        "vllm": "kvtier-vllm",
    },
    ENGINE_GROUP: {"llama.cpp": "kvtier-llamacpp", "transformers": "kvtier-transformers"},
}


class Engine(Protocol):
    """An open engine with its pool and tiers. One prompt at a time."""

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        salt: str | None = None,
        on_token: Callable[[int], bool | None] | None = None,
        choose: "Callable[[NDArray[np.float32]], int] | None" = None,
    ) -> Generation[Any]:
        """Complete a prompt. *on_token* gets every token, and ends the answer by ``True``.

        *choose* picks each token by its logits ``(vocab,)``, which are its own to change; unset, the likeliest.
        """
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything stored so far has reached the tiers; False when that takes longer."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """The session's counters."""
        ...

    def close(self) -> None:
        """Close the pool and the tiers."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...


class Model(Protocol):
    """A model that is loaded, with its tokenizer. The latter may be used by any thread."""

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest prompt, with its answer, that the model was made for."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        ...

    def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation whose next words are the assistant's. A message has ``role`` and ``content``.

        Raises ``UnsupportedModelError`` for a model that has no form for conversations, or not for this one.
        """
        ...

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of an answer."""
        ...

    def open_engine(self, *, max_tokens: int, settings: Settings) -> Engine:
        """Open the engine for prompts that have, with their answers, up to *max_tokens* tokens."""
        ...

    def close(self) -> None:
        """Give the model's memory back. Its engine was closed before."""
        ...


def find_engine(group: str, name: str, blocked: Collection[str] = ()) -> Offer:
    """One engine's offer in *group*, not imported. Raises ``PluginError`` if it is not there, blocked or ambiguous."""
    offers = [offer for offer in find_offers(group, blocked) if offer.group == group]
    offer = pick(offers, name, "engine")
    if offer is None:
        ours = _OUR_DISTRIBUTIONS[group]
        if name in ours:
            raise PluginError(f"engine {name!r} is not installed: pip install {ours[name]}")
        known = usable_names(offers) | set(ours)
        raise PluginError(
            f"unknown engine {name!r}{did_you_mean(name, known)} (there are {', '.join(sorted(known))})"
        )
    return offer


def load_engine(offer: Offer) -> Callable[..., Any]:
    """Import the function that an engine offers. Raises ``PluginError`` when it is broken."""
    function: Callable[..., Any] = offer.load("engine")
    if not callable(function):
        raise PluginError(
            f"engine {offer.name!r} of {offer.origin} ({offer.target}) is no function: update {offer.distribution}"
        )
    return function


def load_model(offer: Offer, path: Path) -> Model:
    """Import the engine's package and load the model at *path*.

    Raises ``PluginError``, ``ConfigError`` or ``UnsupportedModelError`` where that can't be done.
    """
    model: Model = load_engine(offer)(path)
    return model


def hand_over(engine: Engine) -> None:
    """Wait until the tiers have everything. Raises ``KvtierError`` when they do not take it in time."""
    if not engine.flush(_FLUSH_TIMEOUT_S):
        raise KvtierError(
            f"the completions are done, but the tiers did not take all blocks within {_FLUSH_TIMEOUT_S:g} s: a later "
            "run will compute some of them again"
        )
