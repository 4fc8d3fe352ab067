"""S3-FIFO: a small queue on probation, a main queue, and a memory of what left too early (Yang et al., 2023).

New entries stand in the small queue. At its end those that were used go on to the main queue, the others leave and
are remembered: one that comes back goes to the main queue at once. At the end of the main queue a used entry gets
another round for each of its uses, and with it its chain. Neither order changes when an entry is used, so that one
pass over many blocks, each used once, costs the main queue nothing.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Generic

from kvtier_core.policies import E, Order, is_astray, leave
from kvtier_core.tier import OffloadKey
from kvtier_policies.ghosts import Ghosts

_MAX_ROUNDS = 3
"""Uses that count: bounds how often an entry is passed over before it leaves."""


class S3FIFO(Generic[E]):
    """``EvictionPolicy`` that resists scans. It remembers up to 90 % of *capacity* keys that left the small queue."""

    def __init__(self, capacity: int) -> None:
        self._max_small = max(1, capacity // 10)
        self._small: Order[E] = Order()
        self._main: Order[E] = Order()
        self._ghosts = Ghosts(max(1, capacity - self._max_small))

    def insert(self, entries: Sequence[E]) -> None:
        """New keys go on probation, those that come back go to the main queue."""
        small: list[E] = []
        main: list[E] = []
        for entry in entries:
            if entry.key in self._ghosts:
                self._ghosts.forget(entry.key)
                main.append(entry)
            else:
                small.append(entry)
        self._small.insert(small)
        self._main.insert(main)

    def release(self, entries: Sequence[E]) -> None:
        """Entries that came to the end of a queue while they were held go on to the main queue's other end.

        Unused ones that came to another chain take their place there, in the queue they are in.
        """
        astray = [entry for entry in entries if is_astray(entry)]
        if not astray:
            return
        small: list[E] = []
        main: list[E] = []
        for entry in astray:
            if self._small.has_aside(entry) or self._main.has_aside(entry):
                main.append(entry)
            elif not entry.uses:
                (main if entry.place.order is self._main else small).append(entry)
        self._small.append(small)
        self._main.append(main)

    def remove(self, entries: Sequence[E]) -> None:
        """Forget entries."""
        leave(entries)

    def evict(self, n: int, keep: AbstractSet[OffloadKey]) -> list[E]:
        """From the small queue while it is above its tenth, else from the main queue, while either has any to give."""
        out: list[E] = []
        while (wanted := n - len(out)) > 0:
            surplus = len(self._small) - self._max_small
            if end := self._small.take(min(wanted, surplus), keep):
                self._end_probation(end, out)
            elif end := self._main.take(wanted, keep, up_to_used=True):
                self._end_round(end, out)
            elif end := self._small.take(wanted, keep):
                self._end_probation(end, out)
            else:
                break
        return out

    def _end_probation(self, entries: Sequence[E], out: list[E]) -> None:
        used = [entry for entry in reversed(entries) if entry.uses]
        unused = [entry for entry in entries if not entry.uses]
        for entry in used:
            entry.uses = 0
        self._main.append(used)
        self._ghosts.add(entry.key for entry in unused)
        out += unused

    def _end_round(self, entries: list[E], out: list[E]) -> None:
        """The last one may have been used: then it and its chain have another round, and none before it left."""
        last = entries[-1]
        if last.uses:
            last.uses = min(last.uses, _MAX_ROUNDS) - 1
            self._main.append([entries.pop()])
        out += entries
