"""The ledger decides which pool row belongs to which block, and which blocks may be evicted.

Pure: no thread, clock, I/O or logging. It never looks at bytes. Every row is in exactly one place: free, or the row
of an *arriving*, *ready* or *detached* block.

- arriving: somebody writes the row; the key answers "on its way". The writer holds a pin.
- ready: readable; a candidate for eviction while nobody holds it.
- detached: key and row have parted (a deadline passed, or a reset). The key may live in another row; this row is
  free again once the last pin is gone, and not before, whatever happens in between.

A *pin* is held by a job or a device transfer that touches the row's bytes; a *lease* by a request that was promised
the block of a key. Both keep a ready block from being evicted. Leases are counted by key, and end when key and row
part.

Tables of keys hold all that a lookup needs, so that promising a thousand ready blocks looks at none of them: a look at
a block costs as much as finding its key. Methods take many blocks at once, in prefix order. The tail of a prefix is
evicted before its head.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import takewhile
from typing import Literal, NamedTuple

from kvtier_core.keys import OffloadKey
from kvtier_core.policies.base import Entry, EvictionPolicy


class BlockState(enum.Enum):
    """Where a block stands between its reservation and the end of its row's use."""

    ARRIVING = "arriving"
    READY = "ready"
    DETACHED = "detached"


ARRIVING, READY, DETACHED = BlockState
# By these names, since Python 3.11 takes a quarter of a microsecond to look a member up in its class.


class Block(Entry):
    """One row of the pool and, while that is in use, the block in it: made once, for one block after another.

    After a detach another ``Block`` may carry the same key. Keep none that is neither pinned nor found under its key:
    it may be another key's block by then.
    """

    __slots__ = ("cascades", "is_sealed", "row", "source", "state", "withheld", "writer")

    row: int
    state: BlockState
    cascades: int
    """Tier stores among the pins."""
    source: str
    """The tier the bytes come from, empty when the engine computed them."""
    writer: int
    """The job that writes the row, 0 while that is only planned."""
    is_sealed: bool
    """The row has its proof, or will have it before any store that is planned from now on."""
    withheld: frozenset[str]
    """Tiers that it has not been given only because the request that stored it may not store to them."""

    def __repr__(self) -> str:
        return f"Block({self.key.hex()[:8]}, row={self.row}, {self.state.value}, pins={self.pins})"


_NO_TIERS: frozenset[str] = frozenset()


def _make_blocks(num_rows: int) -> list[Block]:
    """A block for each row, of which only the row has been decided."""
    blocks = [Block() for _ in range(num_rows)]
    for row, block in enumerate(blocks):
        block.row = row
        block.pins = block.cascades = 0
    return blocks


def _begin(
    blocks: Sequence[Block], keys: Sequence[OffloadKey], writer: int, chain: int, depths: Sequence[int]
) -> None:
    """Let free *blocks*, which have no pin and no tier store, be the arriving blocks of *keys*, pinned by *writer*."""
    for block, key, depth in zip(blocks, keys, depths, strict=True):
        block.key = key
        block.depth = depth
        block.chain = chain
        block.writer = writer
        block.pins = 1
        block.uses = 0
        block.place = None
        block.state = ARRIVING
        block.source = ""
        block.is_sealed = False
        block.withheld = _NO_TIERS


class Reservation(NamedTuple):
    """New blocks, the row of each, and the keys that were evicted to make room."""

    blocks: Sequence[Block]
    rows: Sequence[int]
    evicted: Sequence[OffloadKey]


Note = Callable[[Literal["stored", "removed"], Sequence[OffloadKey]], None]


class Ledger:
    """Rows of one pool and the blocks in them. Used by one thread."""

    def __init__(self, num_rows: int, policy: EvictionPolicy[Block]) -> None:
        self.num_rows = num_rows
        self._policy = policy
        self._free = _make_blocks(num_rows)[::-1]
        self._blocks: dict[OffloadKey, Block] = {}
        self._arriving: set[OffloadKey] = set()
        """Keys of the arriving blocks."""
        self._pinned: set[OffloadKey] = set()
        """Keys of the ready blocks that have pins."""
        self._detached: set[Block] = set()
        self.leases: set[OffloadKey] = set()
        """Promised keys, all of which have a block. To be read only."""
        self._more_leases: dict[OffloadKey, int] = {}
        """To how many requests more than one a key is promised, where it is."""
        self._idle = 0
        """Ready blocks that nobody holds."""
        self.note: Note | None = None
        """Called for every key that becomes readable or ceases to be, where it is set (C16)."""
        self.find = self._blocks.get
        """The block that holds a key now, arriving or ready, or ``None``: the dict's own method, without a frame."""

    # -- questions

    def find_all(self, keys: Iterable[OffloadKey]) -> list[Block | None]:
        """For each key the block that holds it now, arriving or ready, or ``None``."""
        return list(map(self._blocks.get, keys))

    def blocks_of(self, keys: Iterable[OffloadKey]) -> list[Block]:
        """The blocks of *keys*, each of which has one, arriving or ready. Raises ``KeyError`` otherwise."""
        return list(map(self._blocks.__getitem__, keys))

    def holds_any(self, keys: Iterable[OffloadKey]) -> bool:
        """Whether one of *keys* has a block, arriving or ready. No block is looked at."""
        return not self._blocks.keys().isdisjoint(keys)

    def ready_prefix(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """The *keys* up to the first whose block is not ready. No block is looked at."""
        ready = list(takewhile(self._blocks.__contains__, keys))
        if self._arriving and not self._arriving.isdisjoint(ready):
            del ready[next(i for i, key in enumerate(ready) if key in self._arriving) :]
        return ready

    def are_ready(self, keys: Iterable[OffloadKey]) -> list[bool]:
        """For each key whether its block is ready. No block is looked at."""
        blocks, arriving = self._blocks, self._arriving
        return [key in blocks and key not in arriving for key in keys]

    def ready_keys(self) -> list[OffloadKey]:
        """The keys of all ready blocks."""
        return [key for key in self._blocks if key not in self._arriving]

    @property
    def blocks(self) -> Collection[Block]:
        """Every arriving or ready block."""
        return self._blocks.values()

    @property
    def room(self) -> int:
        """Rows that a reservation could take: free ones and those of idle blocks."""
        return len(self._free) + self._idle

    @property
    def num_free(self) -> int:
        """Rows that belong to no block."""
        return len(self._free)

    @property
    def num_detached(self) -> int:
        """Rows that wait for their last pin."""
        return len(self._detached)

    def num_leases(self, key: OffloadKey) -> int:
        """To how many requests *key* is promised."""
        return (key in self.leases) + self._more_leases.get(key, 0)

    def is_idle(self, block: Block) -> bool:
        """Whether *block* could be evicted."""
        return block.state is READY and not block.pins and block.key not in self.leases

    # -- reservations

    def reserve(
        self,
        keys: Sequence[OffloadKey],
        keep: Iterable[OffloadKey] = (),
        writer: int = 0,
        *,
        chain: int = 0,
        depths: Sequence[int] | None = None,
    ) -> Reservation | None:
        """Give each of *keys* (none of them held, none twice) a row, evicting idle blocks of keys not in *keep*.

        The new blocks are arriving, pinned for their *writer*, and stand at *depths* of *chain* in the order of
        eviction. ``None``, with nothing changed, when the room can't be made. Raises ``PluginError`` when a plugin's
        eviction policy breaks its word.
        """
        free = self._free
        short = len(keys) - len(free)
        evicted: list[OffloadKey] = []
        if short > 0:
            kept = dict.fromkeys(keep)
            if kept:
                self.lease(kept.keys())
            try:
                if short > self._idle:
                    return None
                evicted = self._evict(short)
            finally:
                if kept:
                    self.unlease(kept, known=kept)
        first = len(free) - len(keys)
        new = free[first:]
        del free[first:]
        _begin(new, keys, writer, chain, range(len(keys)) if depths is None else depths)
        self._blocks.update(zip(keys, new, strict=True))
        self._arriving.update(keys)
        return Reservation(new, tuple([block.row for block in new]), evicted)

    def _evict(self, n: int) -> list[OffloadKey]:
        victims = self._policy.evict(n, self.leases)
        assert len(victims) == n, f"{n} blocks were idle, the policy gave {len(victims)}"
        keys = [block.key for block in victims]
        blocks = self._blocks
        for key in keys:
            del blocks[key]
        self._free += victims
        self._idle -= n
        if self.note is not None:
            self.note("removed", keys)
        return keys

    # -- life of a block

    def make_ready(self, blocks: Sequence[Block], pins: int = 0) -> None:
        """The writer is done and the bytes are right: readable from now on. Its pin gives way to *pins* of readers."""
        for block in blocks:
            block.state = READY
            block.pins = pins
        keys = [block.key for block in blocks]
        arriving = len(self._arriving)
        self._arriving.difference_update(keys)
        assert arriving - len(self._arriving) == len(keys), "one of them was not arriving"
        if pins:
            self._pinned.update(keys)
        else:
            self._idle += len(keys) - self._count_leased(keys)
        self._policy.insert(blocks)
        if self.note is not None:
            self.note("stored", keys)

    def _count_leased(self, keys: Sequence[OffloadKey]) -> int:
        return len(self.leases.intersection(keys)) if self.leases else 0

    def detach(self, blocks: Iterable[Block]) -> Collection[OffloadKey]:
        """Part keys and rows, and end the promises of the keys. Returns the keys that were promised.

        A row is free again once no pin is left.
        """
        ready: list[Block] = []
        promised: list[OffloadKey] = []
        for block in list(blocks):
            assert block.state is not DETACHED, block
            del self._blocks[block.key]
            if block.state is READY:
                ready.append(block)
                self._idle -= self.is_idle(block)
                self._pinned.discard(block.key)
            else:
                self._arriving.remove(block.key)
            if block.key in self.leases:
                self.leases.remove(block.key)
                self._more_leases.pop(block.key, None)
                promised.append(block.key)
            block.state = DETACHED
            if block.pins:
                self._detached.add(block)
            else:
                self._free.append(block)
        self._policy.remove(ready)
        if self.note is not None:
            self.note("removed", [block.key for block in ready])
        return promised

    def pin(self, blocks: Iterable[Block]) -> None:
        """A reader begins to use the rows of ready blocks."""
        taken: list[OffloadKey] = []
        for block in blocks:
            assert block.state is READY, block
            if not block.pins:
                taken.append(block.key)
            block.pins += 1
        self._pinned.update(taken)
        self._idle -= len(taken) - self._count_leased(taken)

    def unpin(self, blocks: Iterable[Block]) -> None:
        """A reader, or the writer of detached blocks, is done with the rows."""
        unpinned: list[Block] = []
        for block in blocks:
            assert block.pins > 0, block
            block.pins -= 1
            if block.pins:
                continue
            if block.state is DETACHED:
                self._detached.remove(block)
                self._free.append(block)
            else:
                unpinned.append(block)
        self._pinned.difference_update([block.key for block in unpinned])
        leases = self.leases
        self._make_idle([block for block in unpinned if block.key not in leases] if leases else unpinned)

    def lease(self, keys: AbstractSet[OffloadKey]) -> None:
        """Promise the arriving or ready blocks of *keys* to a request."""
        leases, more = self.leases, self._more_leases
        fresh = keys
        if not leases.isdisjoint(keys):
            fresh = keys - leases
            for key in keys & leases:
                more[key] = more.get(key, 0) + 1
        leases.update(fresh)
        self._idle -= len(fresh) - len(self._pinned & fresh) - len(self._arriving & fresh)

    def unlease(
        self,
        keys: Collection[OffloadKey],
        known: Collection[OffloadKey] = (),
        *,
        chain: int = 0,
        depth: int = 0,
    ) -> None:
        """A request gives promises back. Each was a use of the key's block, unless the key is in *known*.

        The used blocks come to *chain*, in the order of *keys*, the first of them at *depth*.
        """
        last = keys
        more = self._more_leases
        if more and not more.keys().isdisjoint(keys):
            last = [key for key in keys if key not in more]
            for key in keys:
                if key in more:
                    more[key] -= 1
            for key in [key for key in keys if more.get(key) == 0]:
                del more[key]
        before = len(self.leases)
        self.leases.difference_update(last)
        assert before - len(self.leases) == len(last), "one of them was not promised"
        leases = self.leases
        blocks = self.blocks_of(keys)
        for block in [block for block in blocks if block.key not in known] if known else blocks:
            block.uses += 1
            block.chain = chain
            block.depth = depth
            depth += 1
        self._make_idle([block for block in blocks if not block.pins and block.key not in leases])

    def use(self, placed: Iterable[tuple[Block, int]], chain: int) -> None:
        """Count one use of each block, which comes to its depth of *chain*. In effect when nobody holds it any more."""
        idle: list[Block] = []
        for block, depth in placed:
            block.uses += 1
            block.chain = chain
            block.depth = depth
            if self.is_idle(block):
                idle.append(block)
        self._policy.release(idle)

    def _make_idle(self, blocks: Sequence[Block]) -> None:
        self._idle += len(blocks)
        self._policy.release(blocks)
