"""One SQLite file: connection, transactions, and what its errors mean for a tier.

Decides durability and locking: a rollback journal, and nothing synced. A process that is killed leaves a journal by
which the next one takes back what was half done. After a power loss the file may be old, or broken; rows prove
themselves and a broken index is made anew, so that this costs misses and no wrong bytes. Nothing is mapped into memory,
as a write-ahead log's index would be: a file that others cut short is then an error of a call, and no signal that ends
the process. Knows nothing of what the tables are for.
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

from kvtier_disk.extents.statements import IndexDamagedError, Statements

PAGE_BYTES = 4096
_OPEN_TIMEOUT_S = 10.0  # another process may be making the file compact
_BUSY_TIMEOUT_S = 2.0  # another process's transactions take milliseconds; a dead one's lock is gone with it
_STUCK_TIMEOUT_S = 0.2  # while the last one who waited did so in vain: each of many stores would wait so long
_LOCKED_WAIT_MS = (
    50  # so long this process's loads may have to wait for a call that waits for another process
)
_POLL_S = 0.002
_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of our own is made in it


class Database:
    """One connection, used by one thread at a time. Belongs to the process that opened it."""

    def __init__(self, path: Path, *, journal_bytes: int, read_only: bool = False) -> None:
        """Open *path*, which is made if it is missing. Raises ``OSError``; ``IndexDamagedError`` if it is no index.

        Between transactions the journal takes up to *journal_bytes*.
        """
        self.path = path
        self.read_only = read_only
        self.damage: str | None = None
        """What was found to be wrong with the file, by whatever call met it: it has to be made anew."""
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._journal = Path(f"{path}-journal")
        self._journal_bytes = journal_bytes
        self._is_stuck = False  # another process was in the way for too long, at the last try
        try:
            self._connection = sqlite3.connect(
                f"file:{quote(os.fsencode(path))}?mode={'ro' if read_only else 'rwc'}",
                timeout=_OPEN_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
        except sqlite3.Error as error:
            raise OSError(errno.EIO, f"index: {error}", str(path)) from error
        self._statements = Statements(self._connection, path, self.damaged)
        try:
            self._set_up()
            self._identity = path.stat()
        except OSError as error:
            self.close()
            if not path.exists():
                raise IndexDamagedError(path, "it was deleted while it was opened") from error
            raise

    def _set_up(self) -> None:
        execute = self._statements.execute
        # Without other processes there is no shared memory: a file that says it has a write-ahead log maps none either.
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA mmap_size = 0")
        if not self.read_only:
            execute(f"PRAGMA page_size = {PAGE_BYTES}")
            execute("PRAGMA journal_mode = PERSIST")
        execute("PRAGMA synchronous = OFF")
        execute(f"PRAGMA journal_size_limit = {self._journal_bytes}")
        execute("PRAGMA cache_spill = OFF")  # a writer keeps readers out while it commits, and not before
        execute("PRAGMA locking_mode = NORMAL")
        execute("SELECT count(*) FROM sqlite_master")
        execute(f"PRAGMA busy_timeout = {_LOCKED_WAIT_MS}")

    @contextmanager
    def reading(self) -> Iterator[Statements]:
        """For single statements. Raises ``OSError``, ``ETIMEDOUT`` when another process keeps the file for 2 s."""
        self._check_process()
        with self._lock, self._patient():
            yield self._statements

    @contextmanager
    def view(self) -> Iterator[Statements]:
        """For statements that read one state of the file: keep it short, for no one commits meanwhile.

        Raises ``OSError``.
        """
        with self.reading() as statements, self._ended():
            statements.execute("BEGIN")
            yield statements

    @contextmanager
    def transaction(self) -> Iterator[Statements]:
        """For statements of one transaction, beside no other: whole, or not at all. Raises ``OSError``.

        ``ETIMEDOUT`` when another process keeps it from beginning or ending for 2 s, and sooner while that goes on.
        """
        self._check_process()
        self._begin()
        try:
            with self._patient(), self._ended():
                yield self._statements
            self._is_stuck = False
        finally:
            self._lock.release()

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
            self._statements.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                with suppress(OSError):  # what went wrong first matters more
                    self._statements.execute("ROLLBACK")
            raise

    @property
    def _patience_s(self) -> float:
        return _STUCK_TIMEOUT_S if self._is_stuck else _BUSY_TIMEOUT_S

    @contextmanager
    def _patient(self) -> Iterator[None]:
        """Under the lock: let statements wait for other processes, who keep the file for milliseconds."""
        before, self._statements.patience_s = self._statements.patience_s, self._patience_s
        try:
            yield
        except TimeoutError as error:
            raise self._stuck() from error
        finally:
            self._statements.patience_s = before

    def _stuck(self) -> OSError:
        self._is_stuck = True
        return OSError(
            errno.ETIMEDOUT,
            f"another process has kept the index busy for {_BUSY_TIMEOUT_S:.0f} s: is one stopped, or a backup or an"
            " sqlite3 shell in a transaction?",
            str(self.path),
        )

    def _begin(self) -> None:
        """Begin to write, and hold the lock from then on. While another process writes, others have the lock."""
        give_up = time.monotonic() + self._patience_s
        while True:
            self._lock.acquire()
            try:
                self._statements.execute("BEGIN IMMEDIATE")
            except BaseException as error:
                self._lock.release()
                if not isinstance(error, TimeoutError):
                    raise
                if time.monotonic() > give_up:
                    with self._lock:
                        raise self._stuck() from error
            else:
                return
            time.sleep(_POLL_S)

    def journal_size(self) -> int:
        """Bytes that the journal takes on the disk. Raises ``OSError``."""
        try:
            return self._journal.stat().st_size
        except FileNotFoundError:
            return 0

    def compact(self) -> None:
        """Give back the room of pages that hold nothing, unless somebody writes or the disk is full: try again then.

        Raises ``IndexDamagedError``. Cost: writes all that is left of the file anew, and its old pages to the journal.
        """
        try:
            with self.reading() as statements:
                statements.execute("PRAGMA temp_store = MEMORY")
                statements.execute("VACUUM")
        except IndexDamagedError:
            raise
        except OSError:
            return

    def check(self) -> None:
        """Raises ``IndexDamagedError`` when the file's structure is not sound, ``OSError``. Cost: reads all of it."""
        with self.reading() as statements:
            (found,) = statements.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise self.damaged(str(found).rpartition("\n")[2])  # the first line only names the database

    def damaged(self, why: str) -> IndexDamagedError:
        """The error to raise for contents that can't be right; the damage is remembered."""
        error = IndexDamagedError(self.path, why)
        self.damage = str(error.strerror)
        return error

    def version(self) -> int:
        """A number that changes when another connection has committed. Raises ``OSError``.

        Waits no more than 50 ms for another process, unless it is called within ``reading``.
        """
        self._check_process()
        with self._lock:
            number: int = self._statements.execute("PRAGMA data_version").fetchone()[0]
            return number

    @property
    def is_in_place(self) -> bool:
        """Whether the file under the path is the one that was opened. An index made anew may have the same name."""
        try:
            return os.path.samestat(self.path.stat(), self._identity)
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection, unless it is another process's. Twice is fine."""
        if self._pid == os.getpid():
            with (
                self._lock,
                suppress(sqlite3.Error),
            ):  # what a broken file makes of it is no business of who leaves
                self._connection.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise OSError(
                errno.EPERM, "opened by another process: open the tier anew after a fork", str(self.path)
            )


class Snapshot(Database):
    """A database that can't be written: read as it is, and read anew once it has changed."""

    def __init__(self, path: Path) -> None:
        """Open *path* for reading. Raises ``OSError``. Cost: a copy of the index, where its journal has to be used."""
        self._seen = _signature(path)
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._source = path
        try:
            super().__init__(path, journal_bytes=0, read_only=True)
        except OSError:
            if not Path(f"{path}-journal").exists():
                raise
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
            for suffix in ("", "-journal"):
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
    for name in (path, Path(f"{path}-journal")):
        with suppress(OSError):
            status = name.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return found
