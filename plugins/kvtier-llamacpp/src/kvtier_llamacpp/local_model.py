"""The model that ``kvtier run`` and ``kvtier serve`` use."""

from kvtier_core import Settings
from kvtier_llamacpp.engine import Engine
from kvtier_llamacpp.model import Model


class LocalModel(Model):
    """A GGUF file."""

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest prompt, with its answer, that the model was trained with."""
        return self.trained_tokens

    def open_engine(self, *, max_tokens: int, settings: Settings) -> Engine:
        """As ``Engine.open``."""
        return Engine.open(self, max_tokens=max_tokens, config=settings)
