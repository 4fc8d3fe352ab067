"""What the core believes one tier instance to hold: presence for readers, bounds for room, events for followers.

Its owner holds a lock around every method; the presence set may be read by anyone. No I/O, time is an argument. A tier
that the core bounds has ``CoreBounds``, which know every block. A tier that bounds itself has a presence set alone. A
tier that other processes share has to be asked: absence is never known.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking.bounds import CoreBounds
from kvtier_core.manager.changes import MAX_CHANGES, EventLog
from kvtier_core.manager.presence import PresenceSet
from kvtier_core.policies import PolicyFactory, make_policy
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import BlockInfo, TierContext, TierEvent, TierInfo, TierUsage

_MAX_EXPIRED = 1024  # blocks expired in one go: bounds the time the lock is held

_MAX_DOUBTS = 100_000
"""Keys whose blocks may be wrong that are remembered: some 10 MiB."""
_MOST_IN_A_ROW = 3
"""Deletions without one block that was right when it was read again: past it the path is the likelier culprit."""


class KnownContents:
    """The belief about one tier instance. *enumerable*: whether ``adopt`` will be told everything it holds."""

    def __init__(
        self,
        info: TierInfo,
        settings: TierSettings,
        context: TierContext,
        *,
        enumerable: bool,
        policies: Mapping[str, PolicyFactory] | None = None,
    ) -> None:
        self._row_bytes = context.row_bytes
        self._capacity = context.capacity_bytes
        self.shared = info.shared
        """Whether other processes use the tier."""
        self._events = EventLog(MAX_CHANGES)
        self._bounds: CoreBounds | None = None
        self.presence = PresenceSet(
            settings.limits.max_resident_keys, complete=enumerable or not info.persistent
        )
        if info.bounded_by == "core":
            max_blocks = None if self._capacity is None else self._capacity // context.row_bytes
            self._bounds = CoreBounds(
                max_blocks=max_blocks,
                ttl=settings.ttl,
                replaces=info.shared,
                policy=make_policy(
                    settings.policy, max_blocks or settings.limits.max_resident_keys, policies
                ),
            )

    @property
    def answers(self) -> bool:
        """Whether the presence set alone can say that a key is absent."""
        return not self.shared and self.presence.complete

    def adopt(self, found: Iterable[BlockInfo], now: float) -> list[OffloadKey]:
        """Take over what an earlier process left; returns the blocks to delete (too old, or beyond the capacity)."""
        if self._bounds is None:
            self.presence.add(block.key for block in found)
            return []
        kept, surplus = self._bounds.adopt(found, now)
        self.presence.add(kept)
        return surplus

    def holding(self, keys: Sequence[OffloadKey], now: float) -> list[bool]:
        """Which blocks are known to be there, so that they need not be stored again."""
        if self._bounds is None:
            return self.presence.contains_many(keys)
        return [self._bounds.serves(key, now) for key in keys]

    def lacking(self, keys: Sequence[OffloadKey], now: float) -> list[bool]:
        """Which blocks are known not to be there or not to be served, so that the tier need not be asked for them."""
        if self._bounds is not None and not self.shared:
            return [not self._bounds.serves(key, now) for key in keys]
        if not self.answers:
            return [False] * len(keys)
        return [not there for there in self.presence.contains_many(keys)]

    def pin(self, key: OffloadKey) -> None:
        """A call on *key* waits or runs; it may not be evicted."""
        if self._bounds is not None:
            self._bounds.pin(key)

    def unpin(self, key: OffloadKey) -> None:
        """The call on *key* ended."""
        if self._bounds is not None:
            self._bounds.unpin(key)

    def touch(self, key: OffloadKey, chain: int, depth: int, now: float) -> float | None:
        """Count a use of a block, as the one at *depth* of *chain* (``Entry``); the time that the tier should note."""
        return None if self._bounds is None else self._bounds.touch(key, chain, depth, now)

    def reserve(self, key: OffloadKey, chain: int, depth: int) -> list[OffloadKey] | None:
        """Make room for *key*: returns the blocks to delete first, no longer present; ``None`` if the tier is full."""
        if self._bounds is None:
            return []
        victims = self._bounds.reserve(key, chain, depth)
        if victims:
            self._vanish(victims)
        return victims

    def evicted(self, victims: Sequence[OffloadKey]) -> None:
        """The delete that ``reserve`` asked for succeeded."""
        if self._bounds is not None:
            self._bounds.left(victims)

    def not_evicted(self, victims: Sequence[OffloadKey], now: float) -> None:
        """That delete failed: the blocks are taken to be there still."""
        if self._bounds is not None:
            self._bounds.stay(victims)
            self._appear([victim for victim in victims if self._bounds.serves(victim, now)])

    def stored(self, keys: Sequence[OffloadKey], now: float) -> dict[OffloadKey, float]:
        """Stores succeeded. Returns the times of use that the tier should note."""
        begun = {} if self._bounds is None else {key: self._bounds.commit(key, now) for key in keys}
        self._appear(keys)
        return {key: begin for key, begin in begun.items() if begin is not None}

    def not_stored(self, keys: Sequence[OffloadKey]) -> None:
        """Stores failed after ``reserve``."""
        if self._bounds is not None:
            for key in keys:
                self._bounds.abandon(key)

    def appeared(self, keys: Sequence[OffloadKey]) -> None:
        """The tier says that others stored these blocks."""
        if self._bounds is None:
            self._appear(self.presence.lacking(keys))

    def distrust(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks can't be had any more, though they may take room: serve them no more."""
        if self._bounds is not None:
            for key in keys:
                self._bounds.distrust(key)
        self._vanish(keys)

    def trust(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks were read again and are right: serve those that are still there."""
        if self._bounds is None:
            self._appear(keys)
        else:
            self._appear([key for key in keys if self._bounds.trust(key)])

    def gone(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks are not in the tier any more."""
        if self._bounds is not None:
            for key in keys:
                self._bounds.forget(key)
        self._vanish(keys)

    def expire(self, now: float) -> list[OffloadKey]:
        """Stop serving blocks that became too old; returns them, to be deleted. Bounded work a call."""
        if self._bounds is None:
            return []
        old = self._bounds.expired(now, _MAX_EXPIRED)
        self.distrust(old)
        return old

    @property
    def next_expiry(self) -> float:
        """When the oldest block becomes too old."""
        return float("inf") if self._bounds is None else self._bounds.next_expiry

    def usage(self) -> TierUsage | None:
        """How full the tier is, where that is known without asking it."""
        if self._bounds is not None:
            blocks = self._bounds.blocks
        elif self.answers:
            blocks = len(self.presence)
        else:
            return None
        return TierUsage(bytes=blocks * self._row_bytes, blocks=blocks, capacity_bytes=self._capacity)

    def take_events(self) -> list[TierEvent]:
        """Changes since the last call, see ``EventLog``."""
        return self._events.take(self.presence.snapshot)

    def _appear(self, keys: Sequence[OffloadKey]) -> None:
        self.presence.add(keys)
        self._events.record("stored", keys)

    def _vanish(self, keys: Sequence[OffloadKey]) -> None:
        self._events.record("removed", self.presence.discard(keys))


class Doubts:
    """Which blocks of a shared tier gave wrong bytes here, and which of them may be deleted for all (contract C37).

    One node's bad path must not empty the store of all. A block that gave wrong bytes is not served by this process,
    then read again, and deleted only when it is wrong again, a few in a row.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[OffloadKey, None] = OrderedDict()
        self._in_a_row = 0

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, key: OffloadKey) -> None:
        """The block gave wrong bytes."""
        self._keys[key] = None
        if len(self._keys) > _MAX_DOUBTS:
            self._keys.popitem(last=False)

    def remove(self, key: OffloadKey) -> None:
        """The block is gone, or was stored anew."""
        self._keys.pop(key, None)

    def was_right(self, key: OffloadKey) -> None:
        """The block was read again, and was right."""
        self.remove(key)
        self._in_a_row = 0

    def was_wrong(self) -> bool:
        """A block was read again, and was wrong again. Whether to delete it."""
        self._in_a_row += 1
        return self._in_a_row <= _MOST_IN_A_ROW
