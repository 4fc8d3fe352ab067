"""A queue that entries can leave from anywhere: LRU, and what the policies of kvtier-policies are made of.

Entries of one chain stay together in a batch, and so do those without a chain that come in one call. An entry knows its
batch, so it leaves or moves at the cost of a few attribute accesses. Its old place is passed over, once, when the batch
comes to the front.

Example: blocks a b of one request, then c d of another, then e f of the first come in this order, and leave as
d c f e b a.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import count, groupby
from operator import attrgetter
from typing import Generic

from kvtier_core.keys import OffloadKey
from kvtier_core.policies.base import E

_ASIDE = -1
"""The chain of the batch of entries that were met while held: of no entry."""
_chain_of = attrgetter("chain")
_depth_of = attrgetter("depth")


class Batch(Generic[E]):
    """Entries that leave together, the first to leave at the end; some may have left since."""

    __slots__ = ("chain", "deepest", "entries", "is_sorted", "left", "name", "order")

    def __init__(self, order: "Order[E]", chain: int, name: int) -> None:
        self.order = order
        self.chain = chain
        """That of its entries, 0 for entries without one."""
        self.name = name
        """Its key in the order: the chain, or a number below that of any chain."""
        self.entries: list[E] = []
        self.left = 0
        """Entries that have their place here; at zero it is gone."""
        self.deepest = 0
        """No entry that ever came was deeper."""
        self.is_sorted = True

    def add(self, new: Sequence[E]) -> None:
        """Entries that have no place come in, in order: the deeper leave first, and of equal ones the later."""
        for entry in new:
            entry.place = self
        if new[0].depth < self.deepest:
            self.is_sorted = False  # they came out of turn: sorted once, when the batch comes to the front
        self.deepest = max(self.deepest, new[-1].depth)
        self.entries += new
        self.left += len(new)

    def sort(self) -> None:
        """Bring entries that came out of turn into order, and forget those that have left."""
        newest_first = dict.fromkeys([entry for entry in reversed(self.entries) if entry.place is self])
        self.entries = [*newest_first][::-1]
        self.entries.sort(key=_depth_of)
        self.is_sorted = True


class Order(Generic[E]):
    """Chains in the order in which something of them came last. Every entry is in at most one order."""

    def __init__(self) -> None:
        self._batches: OrderedDict[int, Batch[E]] = OrderedDict()
        self._names = count(_ASIDE - 1, -1)
        self._aside: Batch[E] = Batch(self, _ASIDE, _ASIDE)
        """The place of held entries that were met; it has no list of them, and is never in front."""
        self.size = 0

    def __len__(self) -> int:
        """Entries that have their place here, those set aside among them."""
        return self.size

    def append(self, entries: Sequence[E]) -> None:
        """Put entries, and with them their chains, behind all others, wherever they were before."""
        leave(entries)
        for chain, new in reversed([*_by_chain(entries)]):
            self._last(chain).add(sorted(new, key=_depth_of))
        self.size += len(entries)

    def insert(self, entries: Sequence[E]) -> None:
        """``append`` entries that are in no order and sorted by depth. Of chains in one call the last leaves first."""
        for chain, new in reversed([*_by_chain(entries)]):
            self._last(chain).add(new)
        self.size += len(entries)

    def _last(self, chain: int) -> Batch[E]:
        """The batch of *chain*, behind all others from now on; a new one where there is no chain."""
        batch = self._batches.get(chain) if chain else None
        if batch is not None:
            self._batches.move_to_end(chain)
            return batch
        name = chain or next(self._names)
        batch = self._batches[name] = Batch(self, chain, name)
        return batch

    def take(self, n: int, keep: AbstractSet[OffloadKey], *, up_to_used: bool = False) -> list[E]:
        """Take out the first *n* entries that are not held, by a pin or by *keep*; fewer if there are fewer.

        Held ones that are met are set aside. With *up_to_used* the first that was used is the last to be taken.
        """
        taken: list[E] = []
        while self._batches and len(taken) < n and not (up_to_used and taken and taken[-1].uses):
            batch = next(iter(self._batches.values()))
            if not batch.is_sorted:
                batch.sort()
            if not self._take_tail(batch, n - len(taken), taken, keep, up_to_used=up_to_used):
                self._take_each(batch, n, taken, keep, up_to_used=up_to_used)
            if not batch.left:
                self.drop(batch)
        return taken

    def _take_tail(
        self, batch: Batch[E], n: int, taken: list[E], keep: AbstractSet[OffloadKey], *, up_to_used: bool
    ) -> bool:
        """Take the last *n* entries of a batch, or all there are, unless one of them has to be looked at by itself."""
        tail = batch.entries[-n:]
        if [entry for entry in tail if entry.place is not batch or entry.pins]:
            return False
        if up_to_used and [entry for entry in tail if entry.uses]:
            return False
        if len(batch.entries) != batch.left and len(set(tail)) != len(tail):
            return False  # one that left has come back
        if keep and not keep.isdisjoint([entry.key for entry in tail]):
            return False
        for entry in tail:
            entry.place = None
        del batch.entries[-n:]
        taken += tail[::-1]
        batch.left -= len(tail)
        self.size -= len(tail)
        return True

    def _take_each(
        self, batch: Batch[E], n: int, taken: list[E], keep: AbstractSet[OffloadKey], *, up_to_used: bool
    ) -> None:
        """Take entries of a batch one by one until *n* are *taken*, or none is left in it."""
        entries = batch.entries
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
            if up_to_used and entry.uses:
                return

    def has_aside(self, entry: E) -> bool:
        """Whether *entry* was met here while it was held, and so has no rank any more."""
        return entry.place is self._aside

    def drop(self, batch: Batch[E]) -> None:
        """All entries of *batch* have left."""
        self._batches.pop(batch.name, None)


def _by_chain(entries: Sequence[E]) -> Iterable[tuple[int, Sequence[E]]]:
    """The entries by chain, a run of them at a time. One chain, the usual case, takes a third of the time."""
    chain = entries[0].chain if entries else 0
    for entry in entries:
        if entry.chain != chain:
            return ((of, list(run)) for of, run in groupby(entries, _chain_of))
    return ((chain, entries),) if entries else ()


def is_astray(entry: E) -> bool:
    """Whether *entry* is not in the batch of its chain: the chain has changed, or it was met while it was held."""
    chain: int = entry.place.chain
    return chain != entry.chain


def leave(entries: Sequence[E]) -> None:
    """Take entries out of whatever order they are in."""
    for entry in entries:
        batch = entry.place
        if batch is not None:
            entry.place = None
            order = batch.order
            order.size -= 1
            batch.left -= 1
            if not batch.left:
                order.drop(batch)


class LRU(Generic[E]):
    """``EvictionPolicy`` by recency: the chain whose last use is longest ago leaves first, from its end.

    It remembers nothing of evicted keys.
    """

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
