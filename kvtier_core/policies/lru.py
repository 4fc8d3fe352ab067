"""Least recently used: the chain whose last use is longest ago leaves first, from its end."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Generic

from kvtier_core.keys import OffloadKey
from kvtier_core.policies.base import E
from kvtier_core.policies.order import Order, is_astray, leave


class LRU(Generic[E]):
    """``EvictionPolicy`` by recency alone. It remembers nothing of evicted keys."""

    def __init__(self) -> None:
        self._order: Order[E] = Order()

    def insert(self, entries: Sequence[E]) -> None:
        """The most recently used ones from now on."""
        self._order.insert(entries)

    def release(self, entries: Sequence[E]) -> None:
        """The used ones are the most recent now, and so are those that lost their rank, or came to another chain."""
        moving = [entry for entry in entries if entry.uses or is_astray(entry)]
        for entry in moving:
            entry.uses = 0
        self._order.append(moving)

    def remove(self, entries: Sequence[E]) -> None:
        """Forget entries."""
        leave(entries)

    def evict(self, n: int, keep: AbstractSet[OffloadKey]) -> list[E]:
        """The *n* entries used longest ago."""
        return self._order.take(n, keep)
