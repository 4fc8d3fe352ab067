"""The ledger decides which pool row belongs to which block, and which blocks may be evicted.

Pure: no thread, clock, I/O or logging. It never looks at bytes. Every row is in exactly one place: free, or the row
of an *arriving*, *ready* or *detached* block.

- arriving: somebody writes the row; the key answers "on its way". The writer holds a pin.
- ready: readable; a candidate for eviction while nobody holds it.
- detached: key and row have parted (a deadline passed, or a reset). The key may live in another row; this row is
  free again once the last pin is gone, and not before, whatever happens in between.

A *pin* is held by a job or a device transfer that touches the row's bytes; a *lease* by a request that was promised
the block. Both keep a ready block from being evicted.

Methods take many blocks at once, in prefix order, so that their cost on the engine's thread is a few attribute
accesses a block; the tail of a prefix is evicted before its head.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
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
    """One row in use. Identity matters: after a detach, another ``Block`` may carry the same key.

    A new one is arriving and has the pin of its writer, the job that writes the row (0 while that is only planned).
    """

    __slots__ = ("cascades", "is_sealed", "row", "source", "state", "writer")

    row: int
    state: BlockState
    cascades: int
    """Tier stores among the pins."""
    source: str
    """The tier the bytes come from, empty when the engine computed them."""
    writer: int
    is_sealed: bool
    """The row has its proof, or will have it before any store that is planned from now on."""

    def __repr__(self) -> str:
        return (
            f"Block({self.key.hex()[:8]}, row={self.row}, {self.state.value}, "
            f"pins={self.pins}, leases={self.leases})"
        )


def _new_blocks(keys: Sequence[OffloadKey], rows: Sequence[int], writer: int) -> list[Block]:
    """A new block for each key and row."""
    new: list[Block] = []
    for key, row in zip(keys, rows, strict=True):
        block = Block()
        block.key = key
        block.row = row
        block.writer = writer
        block.pins = 1
        block.leases = block.uses = block.cascades = 0
        block.place = None
        block.state = ARRIVING
        block.source = ""
        block.is_sealed = False
        new.append(block)
    return new


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
        self._free = list(range(num_rows - 1, -1, -1))
        self._blocks: dict[OffloadKey, Block] = {}
        self._detached: set[Block] = set()
        self._idle = 0
        """Ready blocks that nobody holds."""
        self.note: Note | None = None
        """Hears of every key that became readable or ceased to be, where somebody wants to (C16)."""
        self.find = self._blocks.get
        """The block that holds a key now, arriving or ready, or ``None``: the dict's own method, without a frame."""

    # -- questions

    def find_all(self, keys: Iterable[OffloadKey]) -> list[Block | None]:
        """For each key the block that holds it now, arriving or ready, or ``None``."""
        return list(map(self._blocks.get, keys))

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

    @staticmethod
    def is_idle(block: Block) -> bool:
        """Whether *block* could be evicted."""
        return block.state is READY and not block.pins and not block.leases

    # -- reservations

    def reserve(
        self, keys: Sequence[OffloadKey], keep: Sequence[Block] = (), writer: int = 0
    ) -> Reservation | None:
        """Give each of *keys* (none of them held, none twice) a row, evicting idle blocks not in *keep*.

        The new blocks are arriving, each pinned once for its *writer*. ``None``, with nothing changed, when the room
        can't be made. Raises ``PluginError`` when a plugin's eviction policy breaks its word.
        """
        free = self._free
        short = len(keys) - len(free)
        evicted: list[OffloadKey] = []
        if short > 0:
            if short > self._idle or short > self._idle - sum(map(self.is_idle, keep)):
                return None
            evicted = self._evict(short, frozenset(keep))
        first = len(free) - len(keys)
        rows = tuple(free[first:])
        del free[first:]
        new = _new_blocks(keys, rows, writer)
        self._blocks.update(zip(keys, new, strict=True))
        return Reservation(new, rows, evicted)

    def _evict(self, n: int, keep: Collection[Block]) -> list[OffloadKey]:
        victims = self._policy.evict(n, keep)
        assert len(victims) == n, f"{n} blocks were idle, the policy gave {len(victims)}"
        keys = [block.key for block in victims]
        blocks = self._blocks
        for key in keys:
            del blocks[key]
        self._free += [block.row for block in victims]
        self._idle -= n
        if self.note is not None:
            self.note("removed", keys)
        return keys

    # -- life of a block

    def make_ready(self, blocks: Sequence[Block], pins: int = 0) -> None:
        """The writer is done and the bytes are right: readable from now on. Its pin gives way to *pins* of readers."""
        leased = 0
        for block in blocks:
            assert block.state is ARRIVING and block.pins == 1, block  # noqa: PT018 - half the cost of two
            block.state = READY
            block.pins = pins
            if block.leases:
                leased += 1
        if not pins:
            self._idle += len(blocks) - leased
        self._policy.insert(blocks)
        if self.note is not None:
            self.note("stored", [block.key for block in blocks])

    def detach(self, blocks: Iterable[Block]) -> None:
        """Part keys and rows. A row is free again once no pin is left, at once when there is none."""
        ready: list[Block] = []
        for block in list(blocks):
            assert block.state is not DETACHED, block
            del self._blocks[block.key]
            if block.state is READY:
                ready.append(block)
                if not block.pins and not block.leases:
                    self._idle -= 1
            block.state = DETACHED
            block.leases = 0
            if block.pins:
                self._detached.add(block)
            else:
                self._free.append(block.row)
        self._policy.remove(ready)
        if self.note is not None:
            self.note("removed", [block.key for block in ready])

    def pin(self, blocks: Iterable[Block]) -> None:
        """A reader begins to use the rows of ready blocks."""
        taken = 0
        for block in blocks:
            assert block.state is READY, block
            if not block.pins and not block.leases:
                taken += 1
            block.pins += 1
        self._idle -= taken

    def unpin(self, blocks: Iterable[Block]) -> None:
        """A reader, or the writer of detached blocks, is done with the rows."""
        idle: list[Block] = []
        for block in blocks:
            assert block.pins > 0, block
            block.pins -= 1
            if block.pins:
                continue
            if block.state is DETACHED:
                self._detached.remove(block)
                self._free.append(block.row)
            elif not block.leases:
                idle.append(block)
        self._make_idle(idle)

    def lease(self, blocks: Iterable[Block]) -> None:
        """Promise arriving or ready blocks to a request."""
        taken = 0
        for block in blocks:
            if not block.leases and not block.pins:
                taken += 1
            block.leases += 1
        self._idle -= taken

    def lease_ready(self, key: OffloadKey, leases: dict[Block, None]) -> bool:
        """Find the block of one key and, if it is ready, see to it that it is leased and in *leases*.

        Whether it is ready. For engines that ask key by key: ``find`` and ``lease`` without a loop or a second call.
        """
        block = self._blocks.get(key)
        if block is None or (
            block.pins and block.state is not READY
        ):  # an arriving block has its writer's pin
            return False
        if block not in leases:
            leases[block] = None
            if not block.leases and not block.pins:
                self._idle -= 1
            block.leases += 1
        return True

    def unlease(self, blocks: Iterable[Block], known: Collection[Block] = ()) -> None:
        """A request gives promises back. Each was a use of its block, unless that is in *known*.

        Of a detached block nothing is left to give back.
        """
        idle: list[Block] = []
        for block in blocks:
            if not block.leases:
                assert block.state is DETACHED, block
                continue
            block.leases -= 1
            if block not in known:
                block.uses += 1
            if not block.pins and not block.leases:
                idle.append(block)
        self._make_idle(idle)

    def use(self, blocks: Iterable[Block]) -> None:
        """Count one use of each block for the order of eviction, in effect when nobody holds it any more."""
        idle: list[Block] = []
        for block in blocks:
            block.uses += 1
            if not block.pins and not block.leases and block.state is READY:
                idle.append(block)
        self._policy.release(idle)

    def _make_idle(self, blocks: Sequence[Block]) -> None:
        self._idle += len(blocks)
        self._policy.release(blocks)

    # -- for tests and the simulator

    def check(self) -> None:
        """Assert every invariant. Cost: proportional to the pool."""
        rows = [*self._free, *(b.row for b in self._blocks.values()), *(b.row for b in self._detached)]
        assert sorted(rows) == list(range(self.num_rows)), "a row is lost or held twice"
        idle = 0
        for key, block in self._blocks.items():
            assert block.key == key, block
            assert block.state is not DETACHED, block
            assert block.state is READY or block.pins == 1, block
            idle += self.is_idle(block)
        assert idle == self._idle, "the count of idle blocks is wrong"
        assert all(b.state is DETACHED and b.pins > 0 for b in self._detached)
