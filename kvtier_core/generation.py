"""What an engine adapter's ``generate`` returns, whichever engine it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

LogitsT = TypeVar("LogitsT")


@dataclass(frozen=True, kw_only=True)
class Generation(Generic[LogitsT]):
    """One finished completion. ``LogitsT`` is the engine's own array."""

    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    """``length`` if the answer was cut at ``max_tokens``."""
    prompt_tokens: int
    hit_tokens: int
    """Prompt tokens whose KV was loaded instead of computed."""
    hits_by_tier: Mapping[str, int]
    """The same by where they were found: ``pool`` or a tier's name."""
    misses: Sequence[Mapping[str, Any]]
    """Why no more was loaded: what ``EngineSession.explain`` says of the request."""
    ttft_s: float
    """Seconds from the call to the first token."""
    load_s: float
    """Seconds of it spent looking up and loading cached tokens."""
    seconds: float
    """Seconds from the call to the last token."""
    first_logits: LogitsT = field(repr=False)
    """The logits ``(vocab,)`` the first token was chosen from."""
