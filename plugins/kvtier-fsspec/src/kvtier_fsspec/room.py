"""How much an engine may store before it has to look at the bucket again. Pure.

Others fill the same bucket. What they stored since the last look counts, and isn't known. So between two looks an
engine stores one pack, or a small share of what was free. Then all engines together are over the capacity by one pack
each at most: of those that may still store, none has more than that left.
"""

import enum

_SHARE = 16
"""An engine stores at most one of so many parts of the free room between two looks: so many engines may fill it."""


class Turn(enum.Enum):
    """What a store does next."""

    GO = "go"
    LOOK = "look"
    WAIT = "wait"


class Room:
    """What one engine stored since it last looked. Its owner holds a lock around every method."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._in_flight = 0  # bytes
        self._unseen = 0  # bytes, of them those in flight
        self._is_looking = False

    def next_turn(self, needed: int, held: int) -> Turn:
        """For a store of *needed* bytes, where *held* are known to be there. After GO it is in flight."""
        if self._capacity is not None and self._unseen:
            free = self._capacity - held - self._in_flight
            if self._unseen + needed > free // _SHARE:
                if self._in_flight or self._is_looking:
                    return Turn.WAIT
                self._is_looking = True
                return Turn.LOOK
        self._unseen += needed
        self._in_flight += needed
        return Turn.GO

    def stored(self, needed: int) -> None:
        """The store of a GO is over, in whichever way."""
        self._in_flight -= needed

    def begin_look(self) -> int:
        """A look begins. Returns what it will show of what wasn't seen, for ``looked``."""
        return self._unseen - self._in_flight

    def looked(self, shown: int) -> None:
        """That look is over, and nothing went wrong."""
        self._unseen = max(self._in_flight, self._unseen - shown)

    def end_turn(self) -> None:
        """The look of a LOOK is over, in whichever way."""
        self._is_looking = False
