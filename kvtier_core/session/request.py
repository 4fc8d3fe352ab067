"""What the session keeps of a request, and of a device transfer that is under way."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier_core.prompts import Prompt
from kvtier_core.transfer.direction import Direction
from kvtier_core.values import RequestInfo


@dataclass(eq=False)
class Request:
    """One request, between ``new_request`` and ``finish``."""

    info: RequestInfo
    prompt: Prompt
    offered: int = 0
    """Leading blocks of the prompt that are in the pool already or have been offered to it."""
    has_begun: bool = False
    """Whether KV has been loaded or computed for it, as far as the session was told, since it began, or began anew."""
    load_job: int | None = None
    load_tokens: int = 0
    """Tokens that a load brings or has brought; none when it failed."""
    hits: Counter[str] = field(default_factory=Counter)
    """Loaded tokens by where they came from."""

    def begin_anew(self) -> None:
        """The engine took its device blocks."""
        self.offered = self.load_tokens = 0
        self.hits.clear()
        self.has_begun = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A device transfer that is under way."""

    direction: Direction
    request_id: str
    hits: Mapping[str, int] = field(default_factory=dict)
    """Of a load: its tokens by where they come from."""
    offered: int = 0
    """Of a store: how many blocks of the prompt had been offered before it."""
