"""What the core believes one tier instance to hold: presence for readers, and doubts about bytes.

Its owner holds a lock around every method; the presence set may be read by anyone. No I/O, time is an argument. A tier
that other processes share has to be asked: absence is never known.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from kvtier_core.keys import OffloadKey
from kvtier_core.manager.presence import PresenceSet
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import BlockInfo, TierContext, TierInfo

_MAX_DOUBTS = 100_000
"""Keys whose blocks may be wrong, or can't be loaded, that are remembered: some 10 MiB."""
_MOST_IN_A_ROW = 3
"""Deletions without one block that was right when it was read again: past it the path is the likelier culprit."""


class Contents:
    """What is believed of an instance that bounds itself. ``BoundedContents`` is for one that the core bounds.

    *enumerable*: whether ``adopt`` will be told everything it holds.
    """

    def __init__(
        self,
        info: TierInfo,
        settings: TierSettings,
        context: TierContext,  # noqa: ARG002 - where bounded
        *,
        enumerable: bool,
    ) -> None:
        self.shared = info.shared
        """Whether other processes use the tier."""
        self._is_told = not info.shared or info.reports_contents
        """Whether all changes are made here or reported."""
        self.presence = PresenceSet(
            settings.limits.max_resident_keys, complete=enumerable or not info.persistent
        )
        self.doubts = Doubts()
        self._arriving: dict[OffloadKey, tuple[int, int] | None] = {}
        """Blocks that are being stored, and where they will stand: chain and depth (``Entry``).

        ``None`` stands for one that the tier has said to be gone again meanwhile.
        """

    @property
    def answers(self) -> bool:
        """Whether the presence set alone can say that a key is absent."""
        return self._is_told and self.presence.complete

    @property
    def _knows_absence(self) -> bool:
        """Whether a block outside ``holding`` is not there."""
        return self.answers

    def adopt(self, found: Iterable[BlockInfo], now: float) -> list[OffloadKey]:  # noqa: ARG002 - ages count where bounded
        """Take over what an earlier process left; returns the blocks to delete (too old, or beyond the capacity)."""
        self.presence.add(block.key for block in found)
        return []

    def holding(self, keys: Sequence[OffloadKey], now: float) -> list[bool]:  # noqa: ARG002 - as above
        """Which blocks are known to be there, so that they need not be stored again."""
        return self.presence.contains_many(keys)

    def lacking(self, keys: Sequence[OffloadKey], now: float) -> list[bool]:
        """Which blocks are known not to be there or not to be served, so that the tier need not be asked for them."""
        if not self._knows_absence:
            return self.doubts.among(keys)
        return [not there for there in self.holding(keys, now)]

    def pin(self, key: OffloadKey) -> None:
        """A call on *key* waits or runs; it may not be evicted until as many ``unpin``."""

    def unpin(self, key: OffloadKey) -> None:
        """The call on *key* ended."""

    def touch(self, key: OffloadKey, chain: int, depth: int, now: float) -> float | None:  # noqa: ARG002 - as above
        """Count a use of a block, as the one at *depth* of *chain* (``Entry``); the time that the tier should note."""
        return None

    def reserve(self, key: OffloadKey, chain: int, depth: int) -> list[OffloadKey] | None:
        """Make room for *key*: returns the blocks to delete first, no longer present; ``None`` if the tier is full."""
        self._arriving[key] = chain, depth
        return []

    def room_made(self, victims: Sequence[OffloadKey], now: float, *, deleted: bool) -> None:
        """The delete that ``reserve`` asked for has ended; blocks that were not *deleted* are taken to be there still.

        Their store must be told as failed then.
        """

    def stored(self, succeeded: Mapping[OffloadKey, bool], now: float) -> dict[OffloadKey, float]:
        """Stores have ended after ``reserve``. Returns the times of use that the tier should note."""
        begun: dict[OffloadKey, float] = {}
        there: list[OffloadKey] = []
        for key, is_stored in succeeded.items():
            place = self._arriving.pop(key)
            if is_stored and place is not None:
                there.append(key)
                begin = self._enter(key, *place, now)
                if begin is not None:
                    begun[key] = begin
        self.doubts.remove(there)
        self.presence.add(there)
        return begun

    def _enter(self, key: OffloadKey, chain: int, depth: int, now: float) -> float | None:  # noqa: ARG002 - as above
        """A stored block is there. Returns the time of use that the tier should note, if it is another than *now*."""
        return None

    def appeared(self, keys: Sequence[OffloadKey]) -> None:
        """The tier says that others stored these blocks."""
        self.presence.add(keys)

    def distrust(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks can't be had any more, though they may take room: serve them no more."""
        self.presence.discard(keys)

    def trust(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks were read again and are right: serve those that are still there."""
        self.doubts.were_right(keys)
        self.presence.add(keys)

    def gone(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks are not in the tier any more."""
        self.doubts.remove(keys)
        self._arriving.update(dict.fromkeys(self._arriving.keys() & keys))
        self.presence.discard(keys)

    def expire(self, now: float) -> list[OffloadKey]:  # noqa: ARG002 - as above
        """Stop serving blocks that became too old; returns them, to be deleted. Bounded work a call."""
        return []

    @property
    def next_expiry(self) -> float:
        """When the oldest block becomes too old."""
        return float("inf")


class Doubts:
    """Which blocks of a shared tier gave wrong bytes here, and which of them may be deleted for all (contract C37).

    One node's bad path must not empty the store of all. A block that gave wrong bytes is not served by this process,
    then read again, and deleted only when it is wrong again, a few in a row. Blocks that could not be loaded are
    remembered beside them: they are served, but the next store replaces them, whatever the tier says that it holds.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[OffloadKey, bool] = OrderedDict()  # whether the block gave wrong bytes
        self._in_a_row = 0

    def __contains__(self, key: OffloadKey) -> bool:
        """Whether the block gave wrong bytes."""
        return self._keys.get(key, False)

    def among(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """For each key, whether its block gave wrong bytes."""
        return [key in self for key in keys] if self._keys else [False] * len(keys)

    def add(self, keys: Iterable[OffloadKey], *, are_wrong: bool) -> None:
        """The blocks gave wrong bytes, or could not be loaded."""
        self._keys.update({key: are_wrong or key in self for key in keys})
        while len(self._keys) > _MAX_DOUBTS:
            self._keys.popitem(last=False)

    def is_sound(self, key: OffloadKey) -> bool:
        """Whether nothing is known against the block."""
        return key not in self._keys

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """The blocks are gone, or were stored anew."""
        for key in keys:
            self._keys.pop(key, None)

    def were_right(self, keys: Iterable[OffloadKey]) -> None:
        """The blocks were read again, and were right."""
        self.remove(keys)
        self._in_a_row = 0

    def was_wrong(self) -> bool:
        """A block was read again, and was wrong again. Whether to delete it."""
        self._in_a_row += 1
        return self._in_a_row <= _MOST_IN_A_ROW
