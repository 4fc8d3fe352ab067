"""What changed in a tier's contents since somebody last asked (contract C16).

Nothing is kept before the first question; the answer to it is ``cleared`` and the whole contents, and so is the
answer after more changes than the limit. Either way a replay gives the exact contents.

No lock of its own: its owner holds one around every method.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Literal

from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierEvent

MAX_CHANGES = 65_536
"""Kept for a taker of events: some MiB."""


class EventLog:
    """Changes in order, at most *limit* of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changes: list[tuple[Literal["stored", "removed"], OffloadKey]] | None = None

    def record(self, kind: Literal["stored", "removed"], keys: Sequence[OffloadKey]) -> None:
        """Note a change, if anybody listens."""
        if self._changes is None:
            return
        self._changes.extend((kind, key) for key in keys)
        if len(self._changes) > self._limit:
            self._changes = None

    def take(self, contents: Callable[[], Sequence[OffloadKey]]) -> list[TierEvent]:
        """The events since the last call; *contents* is asked only when they have to start anew."""
        changes, self._changes = self._changes, []
        if changes is None:
            keys = tuple(contents())
            return [TierEvent(kind="cleared"), *([TierEvent(kind="stored", keys=keys)] if keys else [])]
        return [
            TierEvent(kind=kind, keys=tuple(key for _, key in run))
            for kind, run in itertools.groupby(changes, key=operator.itemgetter(0))
        ]
