"""Runs SQL statements, and trusts neither the errors nor the values that come back from a file that may be damaged.

Decides what counts as damage. SQLite answers damage with errors of many types: of its own, but also with a
``UnicodeDecodeError`` where it quotes a broken schema, or an ``OverflowError`` for a broken number. And a broken row
may well give values without any error. So every exception of a statement, but those that speak of the machine, says
that the file is damaged; and so does a value that its column can't have.
"""

import errno
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier_disk.extents.form import MAX_EXTENT, MAX_KEY_BYTES, MAX_SLOTS
from kvtier_disk.extents.place import is_namespace

_PRIMARY_CODE = 0xFF
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
_ADVICE = {
    sqlite3.SQLITE_IOERR: ": does the disk fail, or is there a limit of what a file may take (ulimit -f)?",
    sqlite3.SQLITE_CANTOPEN: ": may its directory be used, and does the process have descriptors left (ulimit -n)?",
}
_MOST = 1 << 62  # of numbers that are counted up: far from where SQLite's end
_FILE_NAME = re.compile(r"[0-9A-Za-z-]{1,64}")

Values = Sequence[Any] | Mapping[str, Any]


class IndexDamagedError(OSError):
    """The index is lost, or not what it was: it has to be made anew."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EIO, f"the index is damaged ({why})", str(path))


def index_gone(path: Path) -> OSError:
    """The error to raise where the index is not the root's any more."""
    return OSError(
        errno.ESTALE,
        "the index is gone or was made anew by another process; this one changes over within `refresh`",
        str(path),
    )


class Result:
    """What one statement gave: its rows, all of them, and what it changed."""

    __slots__ = ("_rows", "lastrowid", "rowcount")

    def __init__(self, rows: list[Any], rowcount: int, lastrowid: int | None) -> None:
        self._rows = rows
        self.rowcount = rowcount
        self.lastrowid = lastrowid

    def fetchone(self) -> Any:  # noqa: ANN401 - as the columns are
        """The first row, ``None`` where there is none."""
        return self._rows[0] if self._rows else None

    def fetchall(self) -> list[Any]:
        """All rows."""
        return self._rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


class Statements:
    """The statements of one connection. Raises ``OSError`` alone."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, damaged: Callable[[str], IndexDamagedError]
    ) -> None:
        self._connection = connection
        self._path = path
        self.damaged = damaged
        """Makes the error for contents that can't be right."""
        self.patience_s = 0.0
        """How long a statement waits for other processes, beyond SQLite's own wait."""

    def execute(self, statement: str, values: Values = ()) -> Result:
        """Run one statement to its end. Raises ``OSError``, ``ETIMEDOUT`` while another process keeps the file."""
        give_up = time.monotonic() + self.patience_s
        while True:
            try:
                return self._run(statement, values)
            except TimeoutError:
                if time.monotonic() > give_up:
                    raise

    def executemany(self, statement: str, values: Iterable[Values]) -> None:
        """Run one statement for each of *values*. Raises ``OSError``."""
        try:
            self._connection.executemany(statement, values)
        except Exception as error:
            raise self._translated(error) from error

    def _run(self, statement: str, values: Values) -> Result:
        try:
            cursor = self._connection.execute(statement, values)
            rows = cursor.fetchall()
        except Exception as error:
            raise self._translated(error) from error
        if rows:
            self._check(cursor.description, rows)
        return Result(rows, cursor.rowcount, cursor.lastrowid)

    def _check(self, description: Sequence[Sequence[Any]], rows: Sequence[Sequence[Any]]) -> None:
        for (name, *_), column in zip(description, zip(*rows, strict=True), strict=True):
            fits = _FORMS.get(name)
            if fits is not None and not fits(column):
                raise self.damaged(f"a value that no {name} can be")

    def _translated(self, error: Exception) -> OSError:
        if isinstance(error, OSError):
            return error
        if isinstance(error, MemoryError):
            return OSError(errno.ENOMEM, "no memory for the index", str(self._path))
        if not isinstance(error, sqlite3.Error):
            return self.damaged(f"{type(error).__name__}: {error}")
        exact = getattr(error, "sqlite_errorcode", 0)
        code = exact & _PRIMARY_CODE
        # Text that is no text has no code of SQLite's.
        if code in _DAMAGE or (code == 0 and type(error) is sqlite3.OperationalError):
            return self.damaged(str(error))
        if exact == sqlite3.SQLITE_READONLY_DBMOVED:
            return index_gone(self._path)
        advice = _ADVICE.get(code, "")
        return OSError(_ERRNO.get(code, errno.EIO), f"index: {error}{advice}", str(self._path))


# What a column's values can be, by its name; what is computed, or SQLite's own, has no name here.

_Fits = Callable[[Sequence[Any]], bool]


def _integers(least: int, most: int) -> _Fits:
    return lambda column: set(map(type, column)) == {int} and least <= min(column) and max(column) <= most


def _or_null(fits: _Fits) -> _Fits:
    def fits_where_there_is_one(column: Sequence[Any]) -> bool:
        given = [value for value in column if value is not None]
        return not given or fits(given)

    return fits_where_there_is_one


def _keys(column: Sequence[Any]) -> bool:
    return set(map(type, column)) == {bytes} and all(
        0 < length <= MAX_KEY_BYTES for length in set(map(len, column))
    )


def _texts(fits: Callable[[str], object]) -> _Fits:
    return lambda column: all(type(value) is str and fits(value) for value in column)


_FORMS: Mapping[str, _Fits] = {
    "id": _integers(1, MAX_EXTENT),
    "namespace": _integers(1, MAX_EXTENT),
    "owner": _or_null(_integers(1, MAX_EXTENT)),
    "name": _texts(is_namespace),
    "lock": _texts(_FILE_NAME.fullmatch),
    "row_bytes": _integers(1, _MOST),
    "used": lambda column: set(map(type, column)) == {float},
    "bytes": _integers(1, _MOST),
    "slots": _integers(1, MAX_SLOTS),
    "state": _integers(0, 2),
    "place": _integers(0, (1 << 63) - 1),
    "key": _or_null(_keys),
    "number": _integers(0, _MOST),
    "stored": _integers(0, 1),
    "pairs": lambda column: set(map(type, column)) == {bytes},
}
