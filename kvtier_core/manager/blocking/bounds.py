"""Keeps a tier inside its capacity and its time to live: which blocks it holds, which must leave, and when.

Pure, as ``Contents``. Room is counted in blocks of one size. Every store owns one slot: a free one, or that of a victim
which is deleted before the store. So use never passes the capacity, in whatever order deletes and stores end.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking.contents import Contents
from kvtier_core.policies import Entry, EvictionPolicy, make_policy
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import BlockInfo, TierContext, TierInfo, begin_of

_MINUTE_S = 60.0
"""How finely the time of a block's last use is known after a restart: a write for each use would cost too much."""
_MAX_EXPIRED = 1024
"""Blocks that one call lets become too old: bounds the time that its owner's lock is held."""


class _Stored(Entry):
    """A block that takes a slot."""

    __slots__ = ("is_served", "marked", "time")

    time: float
    """When it was stored."""
    marked: float
    """When the last request that used it began, as the storage knows it. The beginning counts, not the use: so the head
    of a prompt never has an earlier time than its tail, however long its blocks take to come.
    """
    is_served: bool
    """Otherwise its room is taken, and its bytes are not trusted."""


class BoundedContents(Contents):
    """What is believed of an instance that the core bounds, with slots, ages and the order of eviction.

    A key is *stored* (it takes a slot), *arriving* (a slot is its own, the block is not there yet) or *leaving* (its
    slot belongs to an arriving key). Pinned keys are never victims. Without a capacity there is no bound, without a
    ``ttl`` blocks don't age. In a shared tier a store puts its block in the place of one of its key; elsewhere that is
    deleted before.
    """

    def __init__(
        self, info: TierInfo, settings: TierSettings, context: TierContext, *, enumerable: bool
    ) -> None:
        super().__init__(info, settings, context, enumerable=enumerable)
        capacity = context.capacity_bytes
        self._max_blocks = None if capacity is None else capacity // context.row_bytes
        self._ttl = settings.ttl
        most = self._max_blocks or settings.limits.max_resident_keys
        self._policy: EvictionPolicy[Entry] = make_policy(settings.policy, most, context.policies)
        self._stored: OrderedDict[OffloadKey, _Stored] = OrderedDict()  # oldest first
        self._leaving: dict[OffloadKey, _Stored] = {}
        self._pins: Counter[OffloadKey] = Counter()
        self._held = 0
        """Stored blocks that are pinned."""

    @property
    def _knows_absence(self) -> bool:
        return not self.shared

    def adopt(self, found: Iterable[BlockInfo], now: float) -> list[OffloadKey]:
        """As ``Contents.adopt``.

        Expired blocks go, and the longest unused beyond the capacity: unserved, and first to be evicted until they are
        gone. A time ahead of *now* counts as now, so that a clock that was put back lets no block stay for ever.
        """
        blocks = sorted({block.key: block for block in found}.values(), key=lambda block: block.time)
        for block in blocks:
            stored = self._add(block.key, min(block.time, now))
            stored.marked = stored.time if block.used is None else min(block.used, now)
        leaving = sorted(self._stored.values(), key=_in_order_of_use)
        self._policy.insert(leaving[::-1])  # of one call the last leaves first
        fresh = [stored for stored in leaving if not self._is_old(stored, now)]
        room = len(fresh) if self._max_blocks is None else self._max_blocks
        kept = fresh[max(0, len(fresh) - room) :]
        for stored in {*leaving}.difference(kept):
            stored.is_served = False
        self.presence.add(stored.key for stored in kept)
        return [stored.key for stored in leaving if not stored.is_served]

    def holding(self, keys: Sequence[OffloadKey], now: float) -> list[bool]:
        """As ``Contents.holding``: blocks that are trusted and not too old."""
        found = map(self._stored.get, keys)
        return [stored is not None and self._serves(stored, now) for stored in found]

    def _serves(self, stored: _Stored, now: float) -> bool:
        return stored.is_served and not self._is_old(stored, now)

    def pin(self, key: OffloadKey) -> None:
        """As ``Contents.pin``."""
        self._pins[key] += 1
        stored = self._stored.get(key)
        if stored is not None:
            self._held += not stored.pins
            stored.pins += 1

    def unpin(self, key: OffloadKey) -> None:
        """As ``Contents.unpin``; at the last one the key is a candidate again."""
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
        """As ``Contents.touch``."""
        stored = self._stored.get(key)
        if stored is None or not stored.is_served:  # asked for in vain
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
        """As ``Contents.reserve``: gives *key* a slot.

        A block still stored under *key* itself is a victim, unless the store replaces it: both would not fit.
        """
        own = self._stored.get(key)
        victims: list[OffloadKey] = []
        if own is not None:
            self._remove(own)
            if not self.shared:
                victims = [key]
                self._leaving[key] = own
        else:
            occupied = len(self._stored) + len(self._arriving)
            needed = 0 if self._max_blocks is None else max(0, occupied + 1 - self._max_blocks)
            if needed > len(self._stored) - self._held:
                return None
            for victim in self._policy.evict(needed, frozenset()) if needed else ():
                victims.append(victim.key)
                self._leaving[victim.key] = self._stored.pop(victim.key)
        self._arriving[key] = chain, depth
        self.presence.discard(victims)
        return victims

    def room_made(self, victims: Sequence[OffloadKey], now: float, *, deleted: bool) -> None:
        """As ``Contents.room_made``."""
        for victim in victims:
            left = self._leaving.pop(victim)
            if deleted:
                continue
            # Its age is now out of order, which only delays its removal: `holding` looks at the age itself.
            stayed = self._add(victim, left.time, left.chain, left.depth)
            stayed.marked, stayed.is_served = left.marked, left.is_served
            self._policy.insert([stayed])
            if self._serves(stayed, now):
                self.presence.add([victim])

    def _enter(self, key: OffloadKey, chain: int, depth: int, now: float) -> float | None:
        stored = self._add(key, now, chain, depth)
        self._policy.insert([stored])
        begin = begin_of(chain, now)
        if _minute(begin) == _minute(now):
            return None
        stored.marked = begin
        return begin

    def _add(self, key: OffloadKey, time: float, chain: int = 0, depth: int = 0) -> _Stored:
        """A stored block takes a slot, and is in no order of eviction yet."""
        stored = self._stored[key] = _Stored.of(key)
        stored.time = stored.marked = time
        stored.chain, stored.depth = chain, depth
        stored.is_served = True
        stored.pins = self._pins[key]
        self._held += stored.pins > 0
        return stored

    def appeared(self, keys: Sequence[OffloadKey]) -> None:
        """Nothing: the core counts the blocks that it stores itself."""

    def distrust(self, keys: Sequence[OffloadKey]) -> None:
        """As ``Contents.distrust``: they keep their slots."""
        for key in keys:
            stored = self._stored.get(key) or self._leaving.get(key)
            if stored is not None:
                stored.is_served = False
        super().distrust(keys)

    def trust(self, keys: Sequence[OffloadKey]) -> None:
        """As ``Contents.trust``."""
        self.doubts.were_right(keys)
        there = [key for key in keys if key in self._stored]
        for key in there:
            self._stored[key].is_served = True
        self.presence.add(there)

    def gone(self, keys: Sequence[OffloadKey]) -> None:
        """As ``Contents.gone``: their slots are free."""
        super().gone(keys)
        for key in keys:
            if key in self._stored:
                self._remove(self._stored[key])

    def _remove(self, stored: _Stored) -> None:
        del self._stored[stored.key]
        self._policy.remove([stored])
        self._held -= stored.pins > 0

    def expire(self, now: float) -> list[OffloadKey]:
        """As ``Contents.expire``."""
        if self._ttl is None:
            return []
        old = takewhile(lambda stored: self._is_old(stored, now), self._stored.values())
        expired = list(islice((stored.key for stored in old if stored.is_served), _MAX_EXPIRED))
        self.distrust(expired)
        return expired

    @property
    def next_expiry(self) -> float:
        """As ``Contents.next_expiry``."""
        if self._ttl is None or not self._stored:
            return float("inf")
        return next(iter(self._stored.values())).time + self._ttl

    def _is_old(self, stored: _Stored, now: float) -> bool:
        return self._ttl is not None and stored.time + self._ttl <= now


def _minute(time: float) -> float:
    return time // _MINUTE_S


def _in_order_of_use(stored: _Stored) -> tuple[float, float]:
    """The longest unused first; of those used in one minute, such as the blocks of one prompt, the end first."""
    return _minute(stored.marked), -stored.time
