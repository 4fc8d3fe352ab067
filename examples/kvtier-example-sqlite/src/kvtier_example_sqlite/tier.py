"""Blocks in one SQLite file. Decides how they lie there; what to keep, and when and on which thread, is the core's."""

import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from kvtier_core import TierOpenError
from kvtier_core.tier import BlockInfo, BlockTier, OffloadKey, TierContext, TierInfo, TierSettings

_TABLE = """CREATE TABLE IF NOT EXISTS blocks
            (namespace TEXT, key BLOB, time REAL, block BLOB, PRIMARY KEY (namespace, key))"""
_BUSY_TIMEOUT_S = 30.0  # how long a call waits while another process writes


class SqliteSettings(TierSettings):
    """``[tiers.NAME]`` with ``type = "sqlite"``."""

    path: Path
    """The file; made if it is missing, with its directory."""


class SqliteTier(BlockTier):
    """One row of a table a block. Raises ``sqlite3.Error`` on a fault, from any method but ``open``."""

    Settings = SqliteSettings
    info = TierInfo(medium="disk", persistent=True, default_capacity=4 << 30)

    def __init__(self, settings: SqliteSettings, context: TierContext) -> None:
        """Keep both; no I/O."""
        super().__init__(settings, context)
        self._path = settings.path.expanduser()
        self._lock = threading.Lock()  # calls come from several threads, a connection takes one at a time
        self._opened = ExitStack()

    def open(self) -> None:
        """Open the file. Raises ``TierOpenError``."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
            self._db = self._opened.enter_context(closing(connection))
            self._db.execute("PRAGMA journal_mode = WAL")  # others can read while one process writes
            self._db.execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise TierOpenError(
                f"tier {self.context.name!r} (kvtier-example-sqlite): can't open {str(self._path)!r}: {error}; "
                "set path to a writable SQLite file, or to one that does not exist yet"
            ) from error

    def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Which of *keys* are stored."""
        return [
            bool(self._select("SELECT 1 FROM blocks WHERE namespace = ? AND key = ?", key)) for key in keys
        ]

    def store(self, key: OffloadKey, block: memoryview) -> None:
        """One transaction: the block is there whole, or it is not."""
        row = (self.context.namespace, key, time.time(), block)
        with self._lock, self._db:
            self._db.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?)", row)

    def load(self, key: OffloadKey, into: memoryview) -> bool:
        """Copy the block out. Raises ``ValueError`` when it has another size."""
        found = self._select("SELECT block FROM blocks WHERE namespace = ? AND key = ?", key)
        for (block,) in found:
            into[:] = block
        return bool(found)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Delete the blocks in one transaction. SQLite uses their room again; the file does not shrink."""
        rows = [(self.context.namespace, key) for key in keys]
        with self._lock, self._db:
            self._db.executemany("DELETE FROM blocks WHERE namespace = ? AND key = ?", rows)

    def scan(self) -> Iterable[BlockInfo]:
        """What earlier processes left."""
        rows = self._select("SELECT key, length(block), time FROM blocks WHERE namespace = ?")
        return [BlockInfo(key=OffloadKey(key), bytes=size, time=stored) for key, size, stored in rows]

    def close(self) -> None:
        """Close the file, if it is open."""
        self._opened.close()

    def _select(self, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(statement, (self.context.namespace, *arguments)).fetchall()
