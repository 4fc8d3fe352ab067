"""A queue of entries that an entry can leave from anywhere: what every policy of the core is made of.

Entries that come together stay together in a batch, and an entry knows its batch, so that it leaves or moves on at the
cost of a few attribute accesses: no hashing, no neighbours to mend. What it leaves behind in its old batch is passed
over, once, when the batch comes to the front. It decides nothing about who should leave.
"""

from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Generic

from kvtier_core.keys import OffloadKey
from kvtier_core.policies.base import E

BATCH_SIZE = 64
"""Entries of one batch at most: bounds the left-overs that one call can meet for each entry it takes."""


class Batch(Generic[E]):
    """Entries that came together, the first to leave at the end; some may have left since."""

    __slots__ = ("entries", "left", "order")

    def __init__(self, order: "Order[E]", entries: list[E]) -> None:
        self.order = order
        self.entries = entries
        self.left = len(entries)
        """How many of the entries have their place here still; at zero it is gone, whatever entry names it as place."""


class Order(Generic[E]):
    """Entries in the order in which they came. Every entry is in at most one order."""

    def __init__(self) -> None:
        self._batches: OrderedDict[Batch[E], None] = OrderedDict()
        self._aside: Batch[E] = Batch(self, [])
        """The place of held entries that were met; it has no list of them, and is never in front."""
        self.size = 0
        """How many entries have their place here, those set aside among them."""

    def __len__(self) -> int:
        """How many entries have their place here, those set aside among them."""
        return self.size

    def append(self, entries: Sequence[E]) -> None:
        """Put entries behind all others, wherever they were before; of these the last will be first."""
        leave(entries)
        self.insert(entries)

    def insert(self, entries: Sequence[E]) -> None:
        """``append`` entries that are in no order."""
        end = len(entries)
        while end > 0:
            begin = max(0, end - BATCH_SIZE)
            batch = Batch(self, list(entries[begin:end]))
            for entry in batch.entries:
                entry.place = batch
            self._batches[batch] = None
            end = begin
        self.size += len(entries)

    def take(self, n: int, keep: AbstractSet[OffloadKey] = frozenset()) -> list[E]:
        """Take out the first *n* entries that are not held, by a pin or by *keep*; fewer if there are fewer.

        Held ones that are met are set aside.
        """
        taken: list[E] = []
        while self._batches and len(taken) < n:
            batch = next(iter(self._batches))
            entries = batch.entries
            if len(entries) <= n - len(taken) and self._take_all(batch, taken, keep):
                continue
            while entries and len(taken) < n:
                entry = entries.pop()
                if entry.place is not batch:
                    continue
                batch.left -= 1
                if entry.pins or entry.key in keep:
                    entry.place = self._aside
                    self._aside.left += 1
                    continue
                entry.place = None
                self.size -= 1
                taken.append(entry)
            if not batch.left:
                del self._batches[batch]
        return taken

    def _take_all(self, batch: Batch[E], taken: list[E], keep: AbstractSet[OffloadKey]) -> bool:
        """Take a batch as a whole, unless one of its entries is held or has left."""
        entries = batch.entries[::-1]
        if len(entries) != batch.left or sum([entry.pins for entry in entries]) > 0:
            return False
        if keep and not keep.isdisjoint([entry.key for entry in entries]):
            return False
        taken += entries
        self.size -= len(entries)
        batch.left = 0
        del self._batches[batch]
        return True

    def has_aside(self, entry: E) -> bool:
        """Whether *entry* was met here while it was held, and so has no rank any more."""
        return entry.place is self._aside

    def drop(self, batch: Batch[E]) -> None:
        """All entries of *batch* have left."""
        self._batches.pop(batch, None)


def leave(entries: Sequence[E]) -> None:
    """Take entries out of whatever order they are in."""
    for entry in entries:
        batch = entry.place
        if batch is not None and batch.left:
            entry.place = None
            order = batch.order
            order.size -= 1
            batch.left -= 1
            if not batch.left:
                order.drop(batch)
