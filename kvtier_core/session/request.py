"""A request, from the session's side."""

from collections import Counter
from dataclasses import dataclass, field

from kvtier_core.prompts import HashedPrompt
from kvtier_core.values import RequestInfo


@dataclass(eq=False)
class Request:
    """One request, between ``begin`` and ``end``."""

    info: RequestInfo
    prompt: HashedPrompt
    offered: int = 0
    """Leading blocks of the prompt that are in the pool already or have been offered to it."""
    has_begun: bool = False
    """Whether KV was loaded or computed for it since it began, or was preempted."""
    load_job: int | None = None
    load_tokens: int = 0
    """Tokens that a load brings or has brought; none when it failed."""
    hits: Counter[str] = field(default_factory=Counter)
    """Loaded tokens by where they came from."""

    def forget_device(self) -> None:
        """The engine took its device blocks."""
        self.offered = self.load_tokens = 0
        self.hits.clear()
        self.has_begun = False
