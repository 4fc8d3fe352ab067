"""One SQLite file: connection, transactions, and what its errors mean for a tier.

Decides durability: write-ahead log, synced when it is merged into the file and not at every commit. After a power loss
the index may therefore be some commits old, but never broken; rows prove themselves, so that an old index costs misses
and no wrong bytes. Knows nothing of what the tables are for.
"""

import errno
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

PAGE_BYTES = 4096
_BUSY_TIMEOUT_S = 30.0  # another process's transactions take milliseconds; a dead one's lock is gone with it
_PRIMARY_CODE = 0xFF
_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_BUSY: errno.ETIMEDOUT,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
    sqlite3.SQLITE_PERM: errno.EACCES,
}
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR})


class IndexDamagedError(OSError):
    """The index is lost, or not what it was: it has to be made anew."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EIO, f"the index is damaged ({why})", str(path))


class Database:
    """One connection, used by one thread at a time. Belongs to the process that opened it."""

    def __init__(self, path: Path, *, journal_bytes: int, read_only: bool = False, options: str = "") -> None:
        """Open *path*, which is made if it is missing. Raises ``OSError``; ``IndexDamagedError`` if it is no index.

        *options* are further parameters of the URI for SQLite.
        """
        self.path = path
        self.read_only = read_only
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._journal = Path(f"{path}-wal")
        self._journal_bytes = journal_bytes
        with self._translated():
            self._connection = sqlite3.connect(
                f"file:{quote(os.fsencode(path))}?mode={'ro' if read_only else 'rwc'}{options}",
                timeout=_BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
        try:
            with self._translated():
                self._set_up(journal_bytes)
            self._identity = path.stat()
        except OSError:
            self.close()
            raise

    def _set_up(self, journal_bytes: int) -> None:
        execute = self._connection.execute
        if not self.read_only:
            execute(f"PRAGMA page_size = {PAGE_BYTES}")
            execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        # Half of what is promised: the log of one transaction comes on top before it can be merged.
        execute(f"PRAGMA wal_autocheckpoint = {max(8, journal_bytes // 2 // PAGE_BYTES)}")
        execute(f"PRAGMA journal_size_limit = {journal_bytes}")
        execute("SELECT count(*) FROM sqlite_master").fetchone()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for single statements. Raises ``OSError`` for what SQLite raises."""
        with self._lock, self._translated():
            yield self._connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection in one transaction, beside no other: whole, or not at all. Raises ``OSError``."""
        with self._lock, self._translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def version(self) -> int:
        """A number that changes when another connection has committed."""
        with self.reading() as connection:
            number: int = connection.execute("PRAGMA data_version").fetchone()[0]
            return number

    @property
    def is_in_place(self) -> bool:
        """Whether the file under the path is the one that was opened. An index made anew may have the same name."""
        try:
            return os.path.samestat(self.path.stat(), self._identity)
        except OSError:
            return False

    def tidy(self) -> None:
        """Cut the write-ahead log down if it has outgrown what was promised: a reader was in the way."""
        if (
            not self.read_only
            and self._journal.exists()
            and self._journal.stat().st_size > self._journal_bytes
        ):
            with self.reading() as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        """Close the connection, unless it is another process's. Twice is fine."""
        if self._pid == os.getpid():
            with self._lock:
                self._connection.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        if self._pid != os.getpid():
            raise OSError(
                errno.EPERM, "opened by another process: open the tier anew after a fork", str(self.path)
            )
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE
            if code in _DAMAGE:
                raise IndexDamagedError(self.path, str(error)) from error
            raise OSError(_ERRNO.get(code, errno.EIO), f"index: {error}", str(self.path)) from error


class Snapshot(Database):
    """A database that can't be written, nor its log: read as it is, and read anew once it has changed."""

    def __init__(self, path: Path) -> None:
        """Open *path* for reading. Raises ``OSError``. Cost: a copy of the index, where its log has to be merged."""
        self._seen = _signature(path)
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._source = path
        log = Path(f"{path}-wal")
        if not log.exists():
            # Opened in any other way SQLite would make a log, and leave it.
            super().__init__(path, journal_bytes=0, read_only=True, options="&immutable=1")
            return
        try:
            super().__init__(path, journal_bytes=0, read_only=True)
        except OSError:
            self._copy = tempfile.TemporaryDirectory(prefix="kvtier-index-")
            copied = Path(self._copy.name) / path.name
            for suffix in ("", "-wal"):
                shutil.copyfile(f"{path}{suffix}", f"{copied}{suffix}")
            super().__init__(copied, journal_bytes=0)
            self.read_only = True

    @property
    def is_stale(self) -> bool:
        """Whether the file has changed since it was opened."""
        return _signature(self._source) != self._seen

    def close(self) -> None:
        """Close it, and remove the copy."""
        super().close()
        if self._copy is not None:
            self._copy.cleanup()


def _signature(path: Path) -> list[tuple[int, int, int]]:
    found = []
    for name in (path, Path(f"{path}-wal")):
        with suppress(OSError):
            status = name.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return found
