"""Holds: blocks that a request's hints keep in the pool, also when the request is over.

A held block carries a lease. A pinned one stays until its time is over, and pins have a share of the pool. A retained
one gives way when nothing else can leave: the lowest priority first, and of one request the prompt's end.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
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
    """In prompt order. Each is in one hold: the one of the highest rank, and then of the latest end."""

    def outlasts(self, other: "Hold") -> bool:
        """Whether a block is better off here."""
        return (self.rank, self.until) > (other.rank, other.until)


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
        self._of: dict[OffloadKey, Hold] = {}
        self._holds: dict[Hold, None] = {}
        self._none_ends_before = math.inf
        self.num_pinned = 0

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._of)

    def __iter__(self) -> Iterator[OffloadKey]:
        """Their keys, one lease of each."""
        return iter(self._of)

    def of(self, key: OffloadKey) -> Hold | None:
        """The hold on *key*."""
        return self._of.get(key)

    def take(self, holds: Sequence[Hold], keys: Iterable[OffloadKey], now: float) -> int:
        """Let *holds* of one request keep those of *keys* that the pool has. Returns how many found no place.

        A pin without place is retained, where the request says so as well.
        """
        rest = [key for key in dict.fromkeys(keys) if self._ledger.find(key) is not None]
        for hold in holds:
            hold.until = now + hold.seconds
            rest = [key for key in rest if not self._take(hold, key)]
            if hold.keys:
                self._holds[hold] = None
                self._none_ends_before = min(self._none_ends_before, hold.until)
        return len(rest)

    def _take(self, hold: Hold, key: OffloadKey) -> bool:
        other = self._of.get(key)
        if other is hold or (other is not None and not hold.outlasts(other)):
            return True
        if len(hold.keys) >= hold.max_rows or not self._has_place(hold, other):
            return False
        if other is None:
            self._ledger.lease({key})
        else:
            self._forget(key)
        self._of[key] = hold
        hold.keys[key] = None
        self.num_pinned += hold.rank == _PINNED
        return True

    def _has_place(self, hold: Hold, other: Hold | None) -> bool:
        if hold not in self._holds and len(self._holds) >= self._limits.max_holds:
            return False
        is_more = hold.rank == _PINNED and (other is None or other.rank != _PINNED)
        return not is_more or self.num_pinned < self._limits.max_pinned_rows

    def _forget(self, key: OffloadKey) -> None:
        """*key* is in no hold any more. Its lease goes on."""
        hold = self._of.pop(key)
        del hold.keys[key]
        self.num_pinned -= hold.rank == _PINNED
        if not hold.keys:
            del self._holds[hold]

    def _end(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._forget(key)
        self._ledger.unlease(keys, frozenset(keys))  # to be kept was no use

    def make_room(self, rows: int) -> None:
        """Let retained blocks give way until *rows* rows could be reserved, or no such block is left."""
        if not self._of or self._ledger.room >= rows:
            return
        for hold in sorted(self._holds, key=attrgetter("rank", "until")):
            while hold.rank < _PINNED and hold.keys and (short := rows - self._ledger.room) > 0:
                self._end([*hold.keys][: -short - 1 : -1])

    def lost(self, keys: Iterable[OffloadKey]) -> None:
        """*keys* have parted from their rows, and their leases have ended."""
        for key in keys:
            if key in self._of:
                self._forget(key)

    def expire(self, now: float) -> None:
        """End the holds whose time is over. Cost: one comparison, until the first may end."""
        if now < self._none_ends_before:
            return
        for hold in [hold for hold in self._holds if hold.until <= now]:
            self._end([*hold.keys])
        self._none_ends_before = min((hold.until for hold in self._holds), default=math.inf)
