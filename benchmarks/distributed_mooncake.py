"""Mooncake's part of ``distributed.py``: our tier, and the bare client on the same registered memory.

Decides how each is driven. The client moves as much in one call as our tier does.
"""

from collections.abc import Callable, Sequence
from typing import Any

from distributed_contenders import Managed, Threads

from kvtier_mooncake import MooncakeTier
from kvtier_testing.bench.rows import Contender, Measured, Rows
from tests.tiers.mooncake_store import MooncakeStore

Move = Callable[[list[str], list[int], list[int]], list[int]]


class MooncakeOurs(Managed):
    """Our tier. The store is emptied after each round."""

    def __init__(self, store: MooncakeStore, threads: int) -> None:
        super().__init__("ours", MooncakeTier, {"master_server_address": store.address, "threads": threads})
        self._store = store

    def clear(self) -> None:
        """Empty the store."""
        self._store.clear()


class BareMooncake(Threads):
    """One client, the pool registered once, and nothing else; with *proves*, proofs as ``BareSockets`` makes them."""

    batch_bytes = 16 << 20

    def __init__(self, store: MooncakeStore, threads: int, *, proves: bool = False) -> None:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - where it is installed

        super().__init__(threads)
        self.name = "proven" if proves else "bare"
        self._proves = proves
        self._store = store
        self._client: Any = MooncakeDistributedStore()
        if self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", store.address):
            raise RuntimeError("the bare client could not be set up")
        self._registered: Rows | None = None

    def _move(self, rows: Rows, number: int, move: Move, expected: int) -> Measured:
        is_store = expected == 0
        keys = rows.keys(number)
        if is_store and not self._proves:
            rows.seal(keys)
        if self._registered is not rows:
            self._client.register_buffer(rows.pool.address, rows.total_bytes)
            self._registered = rows
        names = [f"{self.name}/{key.hex()}" for key in keys]

        def one(_thread: int, batch: Sequence[int]) -> None:
            if is_store and self._proves:
                rows.seal(keys, batch)
            addresses = [rows.pool.address + index * rows.row_bytes for index in batch]
            codes = move([names[index] for index in batch], addresses, [rows.row_bytes] * len(batch))
            if set(codes) != {expected}:
                raise RuntimeError(f"the bare client answered {sorted(set(codes))}")
            if self._proves and not is_store:
                rows.check(keys, batch)

        measured = self._each(rows, one)
        if not (is_store or self._proves):
            rows.check(keys)
        return measured

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        return self._move(rows, number, self._client.batch_put_from, 0)

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        rows.wipe()
        return self._move(rows, number, self._client.batch_get_into, rows.row_bytes)

    def clear(self) -> None:
        """Empty the store."""
        self._store.clear()

    def close(self) -> None:
        """End the client."""
        self._pool.shutdown()
        self._client.close()


def contenders(store: MooncakeStore, threads: int) -> list[Contender]:
    """All, with so many threads."""
    return [
        MooncakeOurs(store, threads),
        BareMooncake(store, threads),
        BareMooncake(store, threads, proves=True),
    ]
