"""The ledger decides which pool row belongs to which block, and which blocks may be evicted.

Pure: no thread, clock, I/O or logging. It never looks at bytes. Every row is in exactly one place: free, or the row
of an *arriving*, *ready* or *detached* block.

- arriving: somebody writes the row; the key answers "on its way". The writer holds a pin.
- ready: readable; a candidate for eviction while nobody holds it.
- detached: key and row have parted (a deadline passed, or a reset). The key may live in another row; this row is
  free again once the last pin is gone, and not before, whatever happens in between.

A *pin* is held by a job or a device transfer that touches the row's bytes; a *lease* by a request that was promised
the block. Both keep a ready block from being evicted.
"""

import enum
from collections.abc import Container, Iterable, Sequence

from kvtier_core.keys import OffloadKey
from kvtier_core.policies.base import EvictionPolicy


class BlockState(enum.Enum):
    """Where a block stands between its reservation and the end of its row's use."""

    ARRIVING = "arriving"
    READY = "ready"
    DETACHED = "detached"


_NOTHING: frozenset[OffloadKey] = frozenset()


class Block:
    """One row in use. Identity matters: after a detach, another ``Block`` may carry the same key."""

    __slots__ = ("cascades", "is_sealed", "key", "leases", "pins", "row", "source", "state", "writer")

    def __init__(self, key: OffloadKey, row: int) -> None:
        self.key = key
        self.row = row
        self.state = BlockState.ARRIVING
        self.pins = 0
        self.leases = 0
        self.cascades = 0
        """Tier stores among the pins."""
        self.source = ""
        """The tier the bytes come from, empty when the engine computed them."""
        self.writer = 0
        """The job that writes, or wrote, the row; 0 while that is only planned."""
        self.is_sealed = False
        """The row has its proof, or will have it before any store that is planned from now on."""

    def __repr__(self) -> str:
        return (
            f"Block({self.key.hex()[:8]}, row={self.row}, {self.state.value}, "
            f"pins={self.pins}, leases={self.leases})"
        )


class Ledger:
    """Rows of one pool and the blocks in them. Used by one thread."""

    def __init__(self, num_rows: int, policy: EvictionPolicy[OffloadKey]) -> None:
        self.num_rows = num_rows
        self._policy = policy
        self._free = list(range(num_rows - 1, -1, -1))
        self._blocks: dict[OffloadKey, Block] = {}
        self._detached: set[Block] = set()

    # -- questions

    def find(self, key: OffloadKey) -> Block | None:
        """The block that holds *key* now, arriving or ready."""
        return self._blocks.get(key)

    def find_all(self, keys: Iterable[OffloadKey]) -> list[Block | None]:
        """``find`` for each of *keys*, in order."""
        return list(map(self._blocks.get, keys))

    @property
    def blocks(self) -> Iterable[Block]:
        """Every arriving or ready block."""
        return self._blocks.values()

    @property
    def room(self) -> int:
        """Rows that a reservation could take: free ones and those of idle blocks."""
        return len(self._free) + len(self._policy)

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
        return block.state is BlockState.READY and not block.pins and not block.leases

    # -- reservations

    def reserve(
        self, keys: Sequence[OffloadKey], keep: Container[OffloadKey] = _NOTHING
    ) -> tuple[list[Block], list[OffloadKey]] | None:
        """Give each of *keys* (none of them held) a row, evicting idle blocks not in *keep*.

        Returns the new arriving blocks, each pinned once for its writer, and the evicted keys; ``None``, with nothing
        changed, when the room can't be made.
        """
        victims: list[OffloadKey] = []
        short = len(keys) - len(self._free)
        if short > 0:
            if short > len(self._policy):
                return None
            victims = self._policy.victims(short, keep)
            if len(victims) < short:
                return None
            for key in victims:
                self._evict(key)
        blocks = []
        for key in keys:
            block = Block(key, self._free.pop())
            block.pins = 1
            self._blocks[key] = block
            blocks.append(block)
        return blocks, victims

    def _evict(self, key: OffloadKey) -> None:
        block = self._blocks.pop(key)
        assert self.is_idle(block), block
        self._policy.remove(key)
        self._free.append(block.row)

    # -- life of a block

    def make_ready(self, block: Block) -> None:
        """The writer is done and the bytes are right: readable from now on, writer's pin gone."""
        assert block.state is BlockState.ARRIVING, block
        assert block.pins == 1, block
        block.state = BlockState.READY
        block.pins = 0
        self._policy.insert(block.key)
        if block.leases:
            self._policy.hold(block.key)

    def detach(self, block: Block) -> None:
        """Part key and row. The row is free again once no pin is left, at once when there is none."""
        assert block.state is not BlockState.DETACHED, block
        del self._blocks[block.key]
        if block.state is BlockState.READY:
            self._policy.remove(block.key)
        block.state = BlockState.DETACHED
        block.leases = 0
        self._detached.add(block)
        self._free_if_done(block)

    def pin(self, block: Block) -> None:
        """A reader begins to use the row."""
        assert block.state is BlockState.READY, block
        self._hold(block)
        block.pins += 1

    def unpin(self, block: Block) -> None:
        """A reader, or the writer of a detached block, is done with the row."""
        assert block.pins > 0, block
        block.pins -= 1
        if block.state is BlockState.DETACHED:
            self._free_if_done(block)
        else:
            self._release(block)

    def lease(self, block: Block) -> None:
        """Promise an arriving or ready block to a request."""
        assert block.state is not BlockState.DETACHED, block
        if block.state is BlockState.READY:
            self._hold(block)
        block.leases += 1

    def unlease(self, block: Block) -> None:
        """A request gives its promise back. Of a detached block nothing is left to give back."""
        if block.state is BlockState.DETACHED:
            return
        assert block.leases > 0, block
        block.leases -= 1
        if block.state is BlockState.READY:
            self._release(block)

    def _hold(self, block: Block) -> None:
        if not block.pins and not block.leases:
            self._policy.hold(block.key)

    def _release(self, block: Block) -> None:
        if not block.pins and not block.leases:
            self._policy.release(block.key)

    def _free_if_done(self, block: Block) -> None:
        if not block.pins:
            self._detached.remove(block)
            self._free.append(block.row)

    # -- for tests and the simulator

    def check(self) -> None:
        """Assert every invariant. Cost: proportional to the pool."""
        rows = [*self._free, *(b.row for b in self._blocks.values()), *(b.row for b in self._detached)]
        assert sorted(rows) == list(range(self.num_rows)), "a row is lost or held twice"
        idle = 0
        for key, block in self._blocks.items():
            assert block.key == key, block
            assert block.state is not BlockState.DETACHED, block
            assert block.state is BlockState.READY or block.pins == 1, block
            idle += self.is_idle(block)
        assert idle == len(self._policy), "eviction candidates and idle blocks differ"
        assert all(b.state is BlockState.DETACHED and b.pins > 0 for b in self._detached)
