"""Keeps a tier inside its capacity and its time to live: which blocks it holds, which must leave, and when.

Pure bookkeeping for tiers that the core bounds: its owner holds a lock around every method, time is an argument. Room
is counted in blocks of one size. Every store owns one slot: a free one, or that of a victim which is deleted before the
store. So use never passes the capacity, in whatever order deletes and stores end.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from kvtier_core.keys import OffloadKey
from kvtier_core.policies import Entry, EvictionPolicy
from kvtier_core.values import BlockInfo, begin_of

_MINUTE_S = 60.0
"""How finely the time of a block's last use is known after a restart: a write for each use would cost too much."""


class _Stored(Entry):
    """A block that takes a slot."""

    __slots__ = ("marked", "time")

    time: float
    """When it was stored."""
    marked: float
    """When the last request that used it began, as the storage knows it. The beginning counts, not the use: so the head
    of a prompt never has an earlier time than its tail, however long its blocks take to come.
    """


class CoreBounds:
    """Slots, ages and the order of eviction of one tier instance.

    A key is *stored* (it takes a slot), *arriving* (a slot is its own, the block is not there yet) or *leaving* (its
    slot belongs to an arriving key). A stored key can be *unserved*: its room is taken, its bytes are not trusted.
    Pinned keys are never victims. ``max_blocks=None`` means no bound, ``ttl=None`` that blocks don't age.
    """

    def __init__(
        self,
        *,
        max_blocks: int | None,
        ttl: float | None,
        policy: EvictionPolicy[Entry],
        replaces: bool = False,
    ) -> None:
        """*replaces*: a store puts its block in the place of one of its key, which need not be deleted before."""
        self._max_blocks = max_blocks
        self._ttl = ttl
        self._policy = policy
        self._replaces = replaces
        self._stored: OrderedDict[OffloadKey, _Stored] = OrderedDict()  # oldest first
        self._held = 0
        """Stored blocks that are pinned."""
        self._unserved: set[OffloadKey] = set()
        self._arriving: dict[OffloadKey, tuple[int, int]] = {}
        """The chain of each, and its depth in it."""
        self._leaving: dict[OffloadKey, _Stored] = {}
        self._pins: Counter[OffloadKey] = Counter()

    @property
    def blocks(self) -> int:
        """How many blocks the tier holds now, those being deleted among them."""
        return len(self._stored) + len(self._leaving)

    def adopt(self, found: Iterable[BlockInfo], now: float) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Take over the blocks of an earlier process: returns (kept, to be deleted).

        Expired blocks go, and the longest unused beyond the capacity: unserved, and first to be evicted until they are
        forgotten. A time ahead of *now* counts as now, so that a clock that was put back lets no block stay for ever.
        """
        blocks = sorted({block.key: block for block in found}.values(), key=lambda block: block.time)
        for block in blocks:
            stored = self._add(block.key, min(block.time, now))
            stored.marked = stored.time if block.used is None else min(block.used, now)
        leaving = sorted(self._stored.values(), key=_in_order_of_use)
        self._policy.insert(leaving[::-1])  # of one call the last leaves first
        fresh = [stored.key for stored in leaving if not self._is_old(stored.time, now)]
        room = len(fresh) if self._max_blocks is None else self._max_blocks
        kept = fresh[max(0, len(fresh) - room) :]
        self._unserved.update(self._stored.keys() - kept)
        return kept, [stored.key for stored in leaving if stored.key in self._unserved]

    def serves(self, key: OffloadKey, now: float) -> bool:
        """Whether the tier holds a block under *key* that is trusted and not too old."""
        stored = self._stored.get(key)
        return stored is not None and key not in self._unserved and not self._is_old(stored.time, now)

    def pin(self, key: OffloadKey) -> None:
        """A call on *key* waits or runs: it is no victim until as many ``unpin``."""
        self._pins[key] += 1
        stored = self._stored.get(key)
        if stored is not None:
            self._held += not stored.pins
            stored.pins += 1

    def unpin(self, key: OffloadKey) -> None:
        """The call ended; at the last one the key is a candidate again."""
        self._pins[key] -= 1
        assert self._pins[key] >= 0, f"unpinned more often than pinned: {key.hex()}"
        if self._pins[key] == 0:
            del self._pins[key]
        stored = self._stored.get(key)
        if stored is not None:
            stored.pins -= 1
            if not stored.pins:
                self._held -= 1
                self._policy.release([stored])

    def touch(self, key: OffloadKey, chain: int, depth: int, now: float) -> float | None:
        """Count a use of a block, now at *depth* of *chain*. Returns the time that the storage should note, if any."""
        stored = self._stored.get(key)
        if stored is None or key in self._unserved:  # asked for in vain
            return None
        stored.uses += 1
        stored.chain, stored.depth = chain, depth
        if not stored.pins:
            self._policy.release([stored])
        begin = begin_of(chain, now)
        if _minute(begin) <= _minute(stored.marked):
            return None
        stored.marked = begin
        return begin

    def reserve(self, key: OffloadKey, chain: int, depth: int) -> list[OffloadKey] | None:
        """Give *key* a slot: returns the blocks to delete before the store, ``None`` when no room can be made.

        A block still stored under *key* itself is one of them, unless the store replaces it: both would not fit.
        """
        if key in self._stored and self._replaces:
            self.forget(key)
            victims = []
        elif key in self._stored:
            victims = [key]
            self._policy.remove([self._stored[key]])
        else:
            occupied = len(self._stored) + len(self._arriving)
            needed = 0 if self._max_blocks is None else max(0, occupied + 1 - self._max_blocks)
            if needed > len(self._stored) - self._held:
                return None
            victims = [entry.key for entry in self._policy.evict(needed, frozenset())] if needed else []
        for victim in victims:
            self._leaving[victim] = stored = self._stored.pop(victim)
            self._held -= stored.pins > 0
        self._arriving[key] = chain, depth
        return victims

    def left(self, victims: Sequence[OffloadKey]) -> None:
        """The victims' delete succeeded."""
        for victim in victims:
            del self._leaving[victim]
            self._unserved.discard(victim)

    def stay(self, victims: Sequence[OffloadKey]) -> None:
        """The victims' delete failed: they keep their slots. Their store must be given up with ``abandon``."""
        for victim in victims:
            # Its age is now out of order, which only delays its removal: `serves` looks at the age itself.
            left = self._leaving.pop(victim)
            self._enter(victim, left.time, left.chain, left.depth).marked = left.marked

    def commit(self, key: OffloadKey, now: float) -> float | None:
        """The store of *key* succeeded. Returns the time of use that the storage should be told, if it is another."""
        chain, depth = self._arriving.pop(key)
        stored = self._enter(key, now, chain, depth)
        begin = begin_of(chain, now)
        if _minute(begin) == _minute(now):
            return None
        stored.marked = begin
        return begin

    def abandon(self, key: OffloadKey) -> None:
        """The store of *key* did not happen; its slot is free."""
        self._arriving.pop(key, None)

    def trust(self, key: OffloadKey) -> bool:
        """The block was read again and is right. Whether it is still there."""
        self._unserved.discard(key)
        return key in self._stored

    def distrust(self, key: OffloadKey) -> None:
        """The block is there but can't be had: keep its slot, serve it no more."""
        if key in self._stored or key in self._leaving:
            self._unserved.add(key)

    def forget(self, key: OffloadKey) -> None:
        """The block is gone; its slot is free."""
        stored = self._stored.pop(key, None)
        if stored is not None:
            self._policy.remove([stored])
            self._held -= stored.pins > 0
            self._unserved.discard(key)

    def expired(self, now: float, limit: int) -> list[OffloadKey]:
        """At most *limit* stored keys that have become too old and are still served."""
        if self._ttl is None:
            return []
        old = takewhile(lambda item: self._is_old(item[1].time, now), self._stored.items())
        return list(islice((key for key, _ in old if key not in self._unserved), limit))

    @property
    def next_expiry(self) -> float:
        """When the oldest block becomes too old."""
        if self._ttl is None or not self._stored:
            return float("inf")
        return next(iter(self._stored.values())).time + self._ttl

    def _enter(self, key: OffloadKey, time: float, chain: int, depth: int) -> _Stored:
        stored = self._add(key, time)
        stored.chain, stored.depth = chain, depth
        self._policy.insert([stored])
        return stored

    def _add(self, key: OffloadKey, time: float) -> _Stored:
        """A stored block takes a slot, and is in no order of eviction yet."""
        stored = _Stored.of(key)
        stored.time = stored.marked = time
        stored.pins = self._pins[key]
        self._stored[key] = stored
        self._held += stored.pins > 0
        return stored

    def _is_old(self, stored: float, now: float) -> bool:
        return self._ttl is not None and stored + self._ttl <= now


def _minute(time: float) -> float:
    return time // _MINUTE_S


def _in_order_of_use(stored: _Stored) -> tuple[float, float]:
    """The longest unused first; of those used in one minute, such as the blocks of one prompt, the end first."""
    return _minute(stored.marked), -stored.time
