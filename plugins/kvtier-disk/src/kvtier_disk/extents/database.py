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
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from kvtier_disk.extents.shared_memory import SharedMemory

PAGE_BYTES = 4096
_FRAME_BYTES = PAGE_BYTES + 24  # a page in the journal
_OPEN_TIMEOUT_S = 10.0  # the last one out merges the whole journal meanwhile
_BUSY_TIMEOUT_S = 2.0  # another process's transactions take milliseconds; a dead one's lock is gone with it
_STUCK_TIMEOUT_S = 0.2  # while the last one who waited did so in vain: each of many stores would wait so long
_MERGE_TIMEOUT_S = 0.5
_LOCKED_WAIT_MS = (
    50  # so long this process's loads may have to wait for a call that waits for another process
)
_POLL_S = 0.002
_PRIMARY_CODE = 0xFF
_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of our own is made in it
_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_BUSY: errno.ETIMEDOUT,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
    sqlite3.SQLITE_PERM: errno.EACCES,
}
_DAMAGE = frozenset(
    {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA}
    | {sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_FORMAT}
)


_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT})


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
        self.damage: str | None = None
        """What was found to be wrong with the file, by whatever call met it: it has to be made anew."""
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._journal = Path(f"{path}-wal")
        self._journal_bytes = journal_bytes
        self._is_stuck = False  # another process was in the way for too long, at the last try
        with self._translated():
            self._connection = sqlite3.connect(
                f"file:{quote(os.fsencode(path))}?mode={'ro' if read_only else 'rwc'}{options}",
                timeout=_OPEN_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
        self._shared: SharedMemory | None = None
        try:
            if not options:
                self._shared = self._take_shared_memory()
            with self._translated():
                self._set_up(journal_bytes)
            self._identity = path.stat()
        except OSError:
            self.close()
            raise

    def _take_shared_memory(self) -> SharedMemory | None:
        """``None`` where nothing can be written, by SQLite neither. Raises ``OSError`` where there is no room."""
        try:
            return SharedMemory(self.path)
        except OSError as error:
            if self.read_only and error.errno in _NOT_WRITABLE:
                return None
            raise

    def _set_up(self, journal_bytes: int) -> None:
        execute = self._connection.execute
        if not self.read_only:
            execute(f"PRAGMA page_size = {PAGE_BYTES}")
            execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute(f"PRAGMA wal_autocheckpoint = {max(8, journal_bytes // 4 // _FRAME_BYTES)}")
        execute(f"PRAGMA journal_size_limit = {journal_bytes}")
        execute("SELECT count(*) FROM sqlite_master").fetchone()
        execute(f"PRAGMA busy_timeout = {_LOCKED_WAIT_MS}")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for single statements. Raises ``OSError`` for what SQLite raises."""
        with self._lock, self._translated():
            yield self._connection

    @contextmanager
    def view(self) -> Iterator[sqlite3.Connection]:
        """The connection, for statements that read one state of the file. Raises ``OSError``."""
        with self._lock, self._translated(), self._ended():
            self._connection.execute("BEGIN")
            yield self._connection

    @contextmanager
    def transaction(self, *, for_store: bool = False) -> Iterator[sqlite3.Connection]:
        """The connection in one transaction, beside no other: whole, or not at all. Raises ``OSError``.

        ``ETIMEDOUT`` when another process keeps it from beginning for 2 s, and sooner while that goes on; ``ENOSPC``
        when the journal is as long as it may be, and can't be merged: that of a process that stores (*for_store*) comes
        first, so that others can end what they have begun.
        """
        self._keep_journal_short(self._journal_bytes // 2 if for_store else self._journal_bytes * 3 // 4)
        self._begin()
        try:
            with self._translated(), self._ended():
                yield self._connection
        finally:
            self._lock.release()

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _begin(self) -> None:
        """Begin to write, and hold the lock from then on. While another process writes, others have the lock."""
        give_up = time.monotonic() + (_STUCK_TIMEOUT_S if self._is_stuck else _BUSY_TIMEOUT_S)
        while True:
            self._lock.acquire()
            try:
                with self._translated():
                    self._connection.execute("BEGIN IMMEDIATE")
            except BaseException as error:
                self._lock.release()
                if not _is_busy(error):
                    raise
                if time.monotonic() > give_up:
                    with self._lock:
                        self._is_stuck = True
                    why = f"another process has been writing the index for {_BUSY_TIMEOUT_S:.0f} s: is one stopped?"
                    raise OSError(errno.ETIMEDOUT, why, str(self.path)) from error
            else:
                self._is_stuck = False
                return
            time.sleep(_POLL_S)

    # The journal.

    def journal_size(self) -> int:
        """Bytes that the journal takes on the disk. Raises ``OSError``."""
        try:
            return self._journal.stat().st_size
        except FileNotFoundError:
            return 0

    def _journal_in_use(self) -> int:
        """Bytes of the journal that can't be written over yet. Raises ``OSError``."""
        with self._lock, self._translated():
            return 0 if self._shared is None else self._shared.pages()[0] * _FRAME_BYTES

    def _keep_journal_short(self, limit: int) -> None:
        """Merge the journal once it is half of what is promised. Raises ``ENOSPC`` if it stays longer than *limit*."""
        if self._journal_in_use() < self._journal_bytes // 2 or not self._journal_bytes:
            return
        give_up = time.monotonic() + _MERGE_TIMEOUT_S
        while not self._merge() and (used := self._journal_in_use()) >= limit:
            if time.monotonic() > give_up:
                raise OSError(
                    errno.ENOSPC,
                    f"the index's journal has its {used} of {self._journal_bytes} bytes and can't be merged: another "
                    "process holds an old state of the index (one that is stopped, a backup, an sqlite3 shell)",
                    str(self.path),
                )
            time.sleep(_POLL_S)

    def _merge(self) -> bool:
        """Merge the journal into the file and cut it to nothing; false while a process reads what is in it."""
        try:
            with self.reading() as connection:
                busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except IndexDamagedError:
            raise
        except OSError:
            return False  # on a full disk: the limit decides
        return not busy

    def compact(self) -> None:
        """Give back the room of pages that hold nothing, unless somebody writes or the disk is full: try again then.

        Raises ``IndexDamagedError``. Cost: writes all that is left of the file anew, through the journal.
        """
        try:
            with self.reading() as connection:
                connection.execute("PRAGMA temp_store = MEMORY")
                connection.execute("VACUUM")
        except IndexDamagedError:
            raise
        except OSError:
            return
        self._merge()

    def settle(self) -> None:
        """Merge the whole journal into the file. Raises ``OSError``: no room for that, or others read what is in it."""
        with self.reading() as connection:
            busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise OSError(
                errno.ETIMEDOUT, "another process reads an index that is being made", str(self.path)
            )

    def check(self) -> None:
        """Raises ``IndexDamagedError`` when the file's structure is not sound, ``OSError``. Cost: reads all of it."""
        with self.reading() as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise self.damaged(str(found).rpartition("\n")[2])  # the first line only names the database

    def damaged(self, why: str) -> "IndexDamagedError":
        """The error to raise for contents that can't be right; the damage is remembered."""
        error = IndexDamagedError(self.path, why)
        self.damage = str(error.strerror)
        return error

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
        if not self.read_only and self.journal_size() > self._journal_bytes:
            self._merge()

    def close(self) -> None:
        """Close the connection, unless it is another process's. Twice is fine."""
        if self._pid == os.getpid():
            with self._lock:
                self._connection.close()
                if self._shared is not None:
                    self._shared.release()
                    self._shared = None

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
            # Text that is no text has no code of SQLite's.
            if code in _DAMAGE or (code == 0 and type(error) is sqlite3.OperationalError):
                raise self.damaged(str(error)) from error
            raise OSError(_ERRNO.get(code, errno.EIO), f"index: {error}", str(self.path)) from error


def _is_busy(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == _ERRNO[sqlite3.SQLITE_BUSY]


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
            if log.stat().st_size == 0:
                super().__init__(path, journal_bytes=0, read_only=True, options="&immutable=1")
                return
            try:
                self._open_copy(None)
            except OSError:
                if not _MEMORY.is_dir():
                    raise
                self._open_copy(_MEMORY)  # the disk may be full, with the directory of temporary files on it
            self.read_only = True

    def _open_copy(self, directory: Path | None) -> None:
        copy = tempfile.TemporaryDirectory(prefix="kvtier-index-", dir=directory)
        copied = Path(copy.name) / self._source.name
        try:
            for suffix in ("", "-wal"):
                shutil.copyfile(f"{self._source}{suffix}", f"{copied}{suffix}")
            super().__init__(copied, journal_bytes=0)
        except BaseException:
            copy.cleanup()
            raise
        self._copy = copy

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
