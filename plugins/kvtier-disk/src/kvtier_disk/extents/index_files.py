"""Which file below a root is its index, and how another takes its place.

::

    <root>/.kvtier/index-<number>.db   the index, the highest number counts
    <root>/.kvtier/id                  the root's number, which its indexes carry

Decides neither when an index has to be made anew nor what is in it.
"""

import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kvtier_disk.extents.database import Database, Snapshot
from kvtier_disk.extents.index import Index

_INDEX_NAME = re.compile(r"index-(\d{6})\.db")
_NOT_IN_USE = re.compile(r"index-\d{6}\.db(-\w+)?|.+\.draft(-\w+)?|probe(-\w+)?")
"""What is made here for a while, and an index with what SQLite puts beside it."""
_MAX_IDENTITY = (1 << 31) - 1  # what SQLite has room for

_T = TypeVar("_T")


class IndexFiles:
    """The index's files in a root's directory *home*. Every method raises ``OSError``."""

    def __init__(self, home: Path, *, journal_bytes: int) -> None:
        """No I/O."""
        self._home = home
        self._journal_bytes = journal_bytes

    def path(self) -> Path | None:
        """Where the index in use is, ``None`` when there is none."""
        found = (
            [
                path
                for path in self._home.iterdir()
                if _INDEX_NAME.fullmatch(path.name) and not path.is_symlink()
            ]
            if self._home.is_dir()
            else []
        )
        return max(found, key=lambda path: path.name, default=None)

    def total_bytes(self) -> int:
        """What the index takes now, with its journal and whatever else lies beside it."""
        return sum(path.lstat().st_size for path in self._home.iterdir())

    def snapshot(self) -> Index | None:
        """The index for reading alone; ``None`` when there is none."""
        path = self.path()
        if path is None:
            return None
        database = Snapshot(path)
        try:
            return Index(database, self.identity())
        except BaseException:
            database.close()
            raise

    def open(self, path: Path) -> Index:
        """Open the index at *path*, which is made if it is missing. Call it ``exclusively``."""
        database = Database(path, journal_bytes=self._journal_bytes)
        try:
            return Index(database, self.identity(make=True))
        except BaseException:
            database.close()
            raise

    def make_first(self) -> Index:
        """Make an index where there is none. Call it ``exclusively``."""
        return self.open(self._home / "index-000001.db")

    def replace(self, fill: Callable[[Index], _T]) -> tuple[Index, _T]:
        """Put a new index, filled by *fill*, in the place of all there are; also returns what *fill* did.

        Those go first, so that the capacity has room for the new one. Without any, whoever opens the root next makes
        one. Call it ``exclusively``.
        """
        last = self.path()
        number = 1 + (int(last.stem.partition("-")[2]) if last is not None else 0)
        path = self._home / f"index-{number:06}.db"
        draft = self._home / "index.draft"
        self.remove_unused(None)
        try:
            index = self.open(draft)
            try:
                filled = fill(index)
            finally:
                index.database.close()
            draft.rename(path)
            draft.with_name(f"{draft.name}-journal").unlink(missing_ok=True)
        except BaseException:
            self.remove_unused(None)
            raise
        return self.open(path), filled

    def remove_unused(self, in_use: Path | None) -> None:
        """Remove what processes that were killed have left, and any index but *in_use*. Call it ``exclusively``.

        Raises no error: what can't be removed takes room, and is otherwise in nobody's way.
        """
        with suppress(OSError):
            for path in list(self._home.iterdir()):
                name = path.name
                is_used = in_use is not None and f"{name}-".startswith(f"{in_use.name}-")
                if not is_used and _NOT_IN_USE.fullmatch(name):
                    with suppress(OSError):
                        path.unlink()

    def identity(self, *, make: bool = False) -> int:
        """The number that this root's indexes carry, to tell them from another root's; 0 where there is none."""
        path = self._home / "id"
        with suppress(FileNotFoundError, ValueError):
            known = int.from_bytes(bytes.fromhex(path.read_text(errors="replace")))
            if 0 < known <= _MAX_IDENTITY:
                return known
        if not make:
            return 0
        number = 1 + secrets.randbelow(_MAX_IDENTITY)
        draft = self._home / "id.draft"
        draft.write_text(number.to_bytes(4).hex())
        draft.rename(path)
        return number
