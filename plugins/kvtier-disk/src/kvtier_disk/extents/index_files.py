"""Which file below a root is its index, and how another takes its place.

::

    <root>/.kvtier/index-<number>.db   the index, the highest number counts
    <root>/.kvtier/id                  the root's number, which its indexes carry

Decides neither when an index has to be made anew nor what is in it.
"""

import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kvtier_disk.extents.database import Database, Snapshot
from kvtier_disk.extents.index import Index
from kvtier_disk.extents.statements import IndexDamagedError
from kvtier_disk.folder import Folder

_INDEX_NAME = re.compile(r"index-(\d{6})\.db")
_NOT_IN_USE = re.compile(r"index-\d{6}\.db(-\w+)?|.+\.draft(-\w+)?|probe(-\w+)?")
"""What is made here for a while, and an index with what SQLite puts beside it."""
_MAX_IDENTITY = (1 << 31) - 1  # what SQLite has room for
_IDENTITY = "id"
_IDENTITY_BYTES = 64
"""More than a number takes: what is longer is none."""
_JOURNAL, _LOG = "-journal", "-wal"
_BESIDE = ("", _JOURNAL, _LOG, "-shm")
"""The index and what SQLite opens beside it; the last two where the file says so, as those of earlier versions do."""

_T = TypeVar("_T")


class IndexFiles:
    """The index's files in a root's directory *home*. Every method raises ``OSError``."""

    def __init__(self, home: Folder, *, journal_bytes: int) -> None:
        """No I/O."""
        self._home = home
        self._journal_bytes = journal_bytes

    def path(self) -> Path | None:
        """Where the index in use is, ``None`` when there is none."""
        try:
            with self._home.opened() as handle:
                names = [entry.name for entry in handle.entries() if _INDEX_NAME.fullmatch(entry.name)]
                found = [name for name in names if handle.problem_of(name) is None]
        except (FileNotFoundError, NotADirectoryError):
            return None
        return self._home.path / max(found) if found else None

    def has_log(self, path: Path) -> bool:
        """Whether the index at *path* has a write-ahead log: an earlier version of kvtier uses it, or was killed."""
        with self._home.opened() as handle:
            return any(entry.name == f"{path.name}{_LOG}" for entry in handle.entries())

    def total_bytes(self) -> int:
        """What the index takes now, with its journal and whatever else lies beside it."""
        with self._home.opened() as handle:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in handle.entries())

    def snapshot(self) -> Index | None:
        """The index for reading alone; ``None`` when there is none."""
        path = self.path()
        if path is None:
            return None
        self._check(path)
        if self.has_log(path):
            raise IndexDamagedError(path, "an earlier version of kvtier uses it, or was the last to use it")
        try:
            database = Snapshot(path)
        except OSError:
            if not path.exists():  # deleted since
                return None
            raise
        try:
            return Index(database, self.identity())
        except BaseException:
            database.close()
            raise

    def open(self, path: Path) -> Index:
        """Open the index at *path*. Call it ``exclusively``."""
        return self._open(path, lambda database: Index(database, self.identity()))

    def _make(self, path: Path) -> Index:
        with self._home.opened() as handle:
            for suffix in ("", _JOURNAL):
                os.close(handle.make_file(f"{path.name}{suffix}"))
        return self._open(path, lambda database: Index.make(database, self.identity(make=True)))

    def _open(self, path: Path, read: Callable[[Database], Index]) -> Index:
        self._check(path)
        database = Database(path, journal_bytes=self._journal_bytes)
        try:
            return read(database)
        except BaseException:
            database.close()
            raise

    def _check(self, path: Path) -> None:
        """Raises ``IndexDamagedError`` where something else than files of ours would be opened as the index."""
        with self._home.opened() as handle:
            for suffix in _BESIDE:
                problem = handle.problem_of(f"{path.name}{suffix}")
                if problem is not None:
                    raise IndexDamagedError(path, f"{path.name}{suffix} {problem}")

    def replace(self, fill: Callable[[Index], _T]) -> tuple[Index, _T]:
        """Put a new index, filled by *fill*, in the place of all there are; also returns what *fill* did.

        Those go first, so that the capacity has room for the new one. Without any, whoever opens the root next makes
        one. It gets its name when it is filled: an index that is empty was cut. Call it ``exclusively``.
        """
        with self._home.opened() as handle:  # what is no file of ours has its name, and keeps it
            taken = [
                int(match[1]) for entry in handle.entries() if (match := _INDEX_NAME.fullmatch(entry.name))
            ]
        path = self._home.path / f"index-{1 + max(taken, default=0):06}.db"
        draft = self._home.path / f"{secrets.token_hex(8)}.draft"
        self.remove_unused(None)
        try:
            index = self._make(draft)
            try:
                filled = fill(index)
            finally:
                index.database.close()
            with self._home.opened() as handle:
                # With its journal: one that SQLite makes belongs to a group that others of this root need not be in.
                for suffix in (_JOURNAL, ""):
                    names = f"{draft.name}{suffix}", f"{path.name}{suffix}"
                    os.rename(*names, src_dir_fd=handle.fd, dst_dir_fd=handle.fd)
        except BaseException:
            self.remove_unused(None)
            raise
        return self.open(path), filled

    def remove_unused(self, in_use: Path | None) -> None:
        """Remove what processes that were killed have left, and any index but *in_use*. Call it ``exclusively``.

        Raises no error: what can't be removed takes room, and is otherwise in nobody's way.
        """
        with suppress(OSError), self._home.opened() as handle:
            for name in [entry.name for entry in handle.entries()]:
                is_used = in_use is not None and f"{name}-".startswith(f"{in_use.name}-")
                if not is_used and _NOT_IN_USE.fullmatch(name):
                    with suppress(OSError):
                        handle.unlink(name)

    def identity(self, *, make: bool = False) -> int:
        """The number that this root's indexes carry, to tell them from another root's; 0 where there is none."""
        try:
            with self._home.opened() as handle:
                known = _read_identity(handle.read(_IDENTITY, _IDENTITY_BYTES) or b"")
                if not known and make:
                    known = 1 + secrets.randbelow(_MAX_IDENTITY)
                    handle.publish(_IDENTITY, known.to_bytes(4).hex().encode(), drafts=handle)
        except FileNotFoundError:
            if make:
                raise
            return 0
        return known


def _read_identity(content: bytes) -> int:
    """The number that is written so; 0 for what is none."""
    try:
        known = int.from_bytes(bytes.fromhex(content.decode("ascii")))
    except ValueError:
        return 0
    return known if known <= _MAX_IDENTITY else 0
