"""The model that ``kvtier run`` and ``kvtier serve`` use. Imports torch and transformers when it is loaded."""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier_core import Settings, UnsupportedModelError
from kvtier_transformers.model_path import check_path

if TYPE_CHECKING:
    from kvtier_transformers.engine import Engine


class LocalModel:
    """A transformers directory or a GGUF file, with its tokenizer."""

    def __init__(self, path: Path) -> None:
        """Raises as ``load`` does."""
        check_path(path)
        # Read when torch is loaded: its threads must not spin on cores that the copies to and from the pool need.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from kvtier_transformers.models import load  # noqa: PLC0415

        self._loaded = load(path)
        self._alone = threading.Lock()
        """Held by whoever uses the tokenizer, which refuses two threads at once."""

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest prompt, with its answer, that the model was made for."""
        found: int = self._loaded.model.config.max_position_embeddings
        return found

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        with self._alone:
            found: list[int] = self._loaded.tokenizer.encode(text, verbose=False)
        return found

    def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation whose next words are the assistant's.

        Raises ``UnsupportedModelError`` for a model without a chat template, or whose template refuses it.
        """
        from jinja2.exceptions import TemplateError  # noqa: PLC0415

        tokenizer = self._loaded.tokenizer
        with self._alone:
            try:
                text: Any = tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
                )
            except (ValueError, TemplateError) as error:
                raise UnsupportedModelError(f"the model's chat template can't be used: {error}") from error
            found: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return found

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        with self._alone:
            return str(self._loaded.tokenizer.decode(token_ids, skip_special_tokens=True))

    def open_engine(self, *, max_tokens: int, settings: Settings) -> "Engine":
        """As ``Engine.open``."""
        from kvtier_transformers.engine import Engine  # noqa: PLC0415

        return Engine.open(
            self._loaded.model, max_tokens=max_tokens, config=settings, files=self._loaded.files
        )

    def close(self) -> None:
        """The model's memory goes with this object."""
