"""ARC: recency and frequency, balanced by what was evicted too early (Megiddo and Modha, 2003).

Two orders: entries used once (*recent*) and entries used again (*frequent*). Keys evicted from either are remembered;
one that comes back says that its side was too small, and moves the target between the two.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Generic

from kvtier_core.policies import E, Order, is_astray, leave
from kvtier_core.tier import OffloadKey
from kvtier_policies.ghosts import Ghosts


class ARC(Generic[E]):
    """``EvictionPolicy`` that adapts. It remembers up to *capacity* evicted keys of each side."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        """How many recent entries are wanted; above it they leave before frequent ones."""
        self._recent: Order[E] = Order()
        self._frequent: Order[E] = Order()
        self._left_recent = Ghosts(capacity)
        self._left_frequent = Ghosts(capacity)

    def insert(self, entries: Sequence[E]) -> None:
        """Keys that come back after an eviction are frequent, and adapt the target; others are recent."""
        recent: list[E] = []
        frequent: list[E] = []
        for entry in entries:
            (frequent if self._comes_back(entry) else recent).append(entry)
        self._recent.insert(recent)
        self._frequent.insert(frequent)

    def _comes_back(self, entry: E) -> bool:
        recent, frequent = self._left_recent, self._left_frequent
        if entry.key in recent:
            self._target = min(self._target + max(1.0, len(frequent) / len(recent)), self._capacity)
            recent.forget(entry.key)
            return True
        if entry.key in frequent:
            self._target = max(self._target - max(1.0, len(recent) / len(frequent)), 0.0)
            frequent.forget(entry.key)
            return True
        return False

    def release(self, entries: Sequence[E]) -> None:
        """The used ones are the newest frequent ones now; those that lost their rank get the newest of their side."""
        recent: list[E] = []
        frequent: list[E] = []
        for entry in entries:
            if entry.uses:
                entry.uses = 0
                frequent.append(entry)
            elif is_astray(entry):
                (frequent if entry.place.order is self._frequent else recent).append(entry)
        self._recent.append(recent)
        self._frequent.append(frequent)

    def remove(self, entries: Sequence[E]) -> None:
        """Forget entries."""
        leave(entries)

    def evict(self, n: int, keep: AbstractSet[OffloadKey]) -> list[E]:
        """Recent entries above the target first, then frequent ones, then what is left."""
        surplus = self._recent.take(min(n, len(self._recent) - int(self._target)), keep)
        frequent = self._frequent.take(n - len(surplus), keep)
        rest = self._recent.take(n - len(surplus) - len(frequent), keep)
        self._left_recent.add(entry.key for entry in (*surplus, *rest))
        self._left_frequent.add(entry.key for entry in frequent)
        return [*surplus, *frequent, *rest]
