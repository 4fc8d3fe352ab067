"""Holds: blocks that a request's hints keep in the pool, also when the request is over.

A held block carries a lease. A pinned one stays until its time is over, and pins have a share of the pool. A retained
one gives way when nothing else can leave: the lowest priority first, and of one request the prompt's end.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.hints import Hints
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import Ledger

_PINNED = math.inf
"""The rank of a pin: above every priority."""


@dataclass(eq=False, slots=True)
class Hold:
    """What one hint of one request keeps."""

    rank: float
    """The priority. The lowest gives way first, a pin never."""
    seconds: float
    max_rows: float
    until: float = 0.0
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    """In prompt order."""

    def covers(self, other: "Hold") -> bool:
        """Whether a block that is in this hold gains nothing by *other*."""
        return self.rank >= other.rank and self.until >= other.until


def holds_of(hints: Hints, pin_rows: int | None) -> Sequence[Hold]:
    """What the hints of one request keep, nothing so far; *pin_rows* are the rows that its bytes to pin fill."""
    if not hints.keeps:
        return ()
    pin = Hold(_PINNED, hints.pin_s, math.inf if pin_rows is None else pin_rows)
    return [hold for hold in (pin, Hold(hints.priority, hints.retain_s, math.inf)) if hold.seconds > 0]


class Holds:
    """All holds of one pool."""

    def __init__(self, ledger: Ledger, limits: PoolLimits) -> None:
        self._ledger = ledger
        self._limits = limits
        self.by_key: dict[OffloadKey, list[Hold]] = {}
        """One lease of each key, the strongest hold first: others may end later. To be read only."""
        self._holds: dict[Hold, None] = {}
        self._none_ends_before = math.inf
        self.num_pinned = 0

    def __len__(self) -> int:
        """Blocks held."""
        return len(self.by_key)

    def take(self, holds: Sequence[Hold], keys: Iterable[OffloadKey], now: float) -> int:
        """Let *holds* of one request keep those of *keys* that the pool has. Returns how many found no place.

        A pin without place is retained, where the request says so as well.
        """
        rest = {key: None for key in keys if self._ledger.find(key) is not None}
        kept: set[OffloadKey] = set()
        for hold in holds:
            hold.until = now + hold.seconds
            kept.update([key for key in rest if self._take(hold, key)])
            if hold.keys:
                self._none_ends_before = min(self._none_ends_before, hold.until)
        return len(rest) - len(kept)

    def _take(self, hold: Hold, key: OffloadKey) -> bool:
        found = self.by_key.get(key, [])
        others = [other for other in found if other is not hold]
        if any(other.covers(hold) for other in others):
            return True
        if len(others) == len(found) and not self._has_place(hold, key):
            return False
        if not found:
            self._ledger.lease({key})
        left = [other for other in others if not hold.covers(other)]
        self._set(key, sorted([*left, hold], key=attrgetter("rank"), reverse=True))
        return True

    def _has_place(self, hold: Hold, key: OffloadKey) -> bool:
        if len(hold.keys) >= hold.max_rows:
            return False
        if hold not in self._holds and len(self._holds) >= self._limits.max_holds:
            return False
        is_more = hold.rank == _PINNED and not self._is_pinned(key)
        return not is_more or self.num_pinned < self._limits.max_pinned_rows

    def _is_pinned(self, key: OffloadKey) -> bool:
        return key in self.by_key and self.by_key[key][0].rank == _PINNED

    def _set(self, key: OffloadKey, holds: list[Hold]) -> None:
        """*key* is in these holds, and in no other any more. Its lease is the caller's."""
        self.num_pinned -= self._is_pinned(key)
        for hold in self.by_key.pop(key, []):
            if hold not in holds:
                del hold.keys[key]
                if not hold.keys:
                    del self._holds[hold]
        if holds:
            self.by_key[key] = holds
        for hold in holds:
            hold.keys[key] = None
            self._holds[hold] = None
        self.num_pinned += self._is_pinned(key)

    def _unlease(self, keys: Sequence[OffloadKey]) -> None:
        self._ledger.unlease(keys, frozenset(keys))  # to be kept was no use

    def make_room(self, rows: int) -> None:
        """Let retained blocks give way until *rows* rows could be reserved, or no such block is left."""
        if not self.by_key or self._ledger.room >= rows:
            return
        for hold in sorted(self._holds, key=attrgetter("rank", "until")):
            keys = [key for key in hold.keys if self.by_key[key][0] is hold] if hold.rank < _PINNED else []
            while keys and (short := rows - self._ledger.room) > 0:
                given = keys[: -short - 1 : -1]
                del keys[-short:]
                self.lost(given)
                self._unlease(given)

    def lost(self, keys: Iterable[OffloadKey]) -> None:
        """*keys* have parted from their rows, and their leases have ended."""
        for key in keys:
            if key in self.by_key:
                self._set(key, [])

    def expire(self, now: float) -> None:
        """End the holds whose time is over. Cost: one comparison, until the first may end."""
        if now < self._none_ends_before:
            return
        for hold in [hold for hold in self._holds if hold.until <= now]:
            keys = [*hold.keys]
            for key in keys:
                self._set(key, [other for other in self.by_key[key] if other is not hold])
            self._unlease([key for key in keys if key not in self.by_key])
        self._none_ends_before = min((hold.until for hold in self._holds), default=math.inf)
