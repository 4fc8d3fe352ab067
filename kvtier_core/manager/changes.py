"""What changed in the pool, or in a tier, for somebody who wants to know (C16)."""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Literal

from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierEvent

MAX_CHANGES = 65_536
"""Kept of one place: some MiB. Past it, the next events tell its whole contents."""


class EventLog:
    """The changes of one place, in order. Nothing is kept before the first call of ``take``."""

    def __init__(self) -> None:
        self._changes: list[tuple[Literal["stored", "removed"], OffloadKey]] | None = None

    def record(self, kind: Literal["stored", "removed"], keys: Sequence[OffloadKey]) -> None:
        """Note a change, if anybody listens."""
        if self._changes is None:
            return
        self._changes.extend((kind, key) for key in keys)
        if len(self._changes) > MAX_CHANGES:
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
