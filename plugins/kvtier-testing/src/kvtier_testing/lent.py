"""The rows that a tier under test reads and fills: rows of a real pool among guard rows, or a test's own buffers.

Decides which row is whose. A row belongs to a tier from the submit of a job to its result. All others hold a pattern,
so that a write beside a job's rows, or after its result, is found.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from kvtier_core.transfer.pool import Pool, PoolGeometry
from kvtier_core.values import PoolView

_ROWS = 64
"""Rows that are lent at a time, at most."""
_NOBODYS = 0x5A
_TO_BE_FILLED = 0xA5


class Rows(Protocol):
    """Where the buffers of jobs come from."""

    view: PoolView | None
    """What ``on_open`` is given."""

    def lend(self, buffers: Sequence[memoryview], *, is_load: bool) -> Sequence[int]:
        """A row for each of a test's *buffers*; for a store they hold its bytes."""

    def row(self, row: int) -> memoryview:
        """A view of its own of a row that is lent."""

    def take_back(self, rows: Sequence[int], what: str) -> None:
        """The job called *what* has its result: a load's rows go to the test's buffers."""


class GivenBuffers:
    """A test's own buffers, handed over as they are. There is no pool."""

    view: PoolView | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[int, memoryview] = {}
        self._next = 0

    def lend(self, buffers: Sequence[memoryview], *, is_load: bool) -> Sequence[int]:
        """Number the buffers."""
        with self._lock:
            rows = tuple(range(self._next, self._next + len(buffers)))
            self._next += len(buffers)
            self._views.update(zip(rows, (buffer[:] for buffer in buffers), strict=True))
        return rows

    def row(self, row: int) -> memoryview:
        """A view of that buffer."""
        return self._views[row][:]

    def take_back(self, rows: Sequence[int], what: str) -> None:
        """Forget the buffers."""
        with self._lock:
            for row in rows:
                self._views.pop(row).release()


class LentRows:
    """Rows of a pool that stays mapped until the process ends, so that a late write is found and breaks nothing.

    Every second row is never lent: it guards its neighbours.
    """

    def __init__(self, row_bytes: int) -> None:
        self._pool = Pool.create(PoolGeometry(num_rows=2 * _ROWS + 1, row_bytes=row_bytes))
        geometry = self._pool.geometry
        self.view: PoolView | None = PoolView(
            address=self._pool.address,
            row_stride=row_bytes,
            num_rows=geometry.num_rows,
            fd=self._pool.fd,
            fd_offset=geometry.rows_offset,
        )
        self._lock = threading.Lock()  # guards all below
        self._free = deque(range(1, geometry.num_rows, 2))
        self._watched: set[int] = set()
        """Rows that hold the pattern."""
        self._last: dict[int, str] = {}
        """The last job of each row that was lent."""
        self._waiting: dict[int, memoryview] = {}
        """The test's buffer for each row that a load fills."""

    @property
    def are_all_back(self) -> bool:
        """Whether no tier has a row."""
        return len(self._free) == _ROWS

    def lend(self, buffers: Sequence[memoryview], *, is_load: bool) -> Sequence[int]:
        """Rows that hold the buffers' bytes, or for a load a pattern."""
        with self._lock:
            assert len(buffers) <= len(self._free), (
                f"{len(buffers)} rows are wanted and {len(self._free)} of {_ROWS} are free: use smaller jobs, "
                "or wait for those under way"
            )
            rows = tuple(self._free.popleft() for _ in buffers)
            for row, buffer in zip(rows, buffers, strict=True):
                for guard in {row - 1, row + 1} - self._watched:
                    self._watch(guard)
                self._watched.discard(row)
                if is_load:
                    self._pool.rows_array[row] = _TO_BE_FILLED
                    self._waiting[row] = buffer
                else:
                    self._pool.row(row)[:] = buffer
        return rows

    def row(self, row: int) -> memoryview:
        """A view of that row of the pool."""
        return self._pool.row(row)

    def take_back(self, rows: Sequence[int], what: str) -> None:
        """Copy what a load gave, and let nobody have the rows."""
        with self._lock:
            for row in rows:
                if (buffer := self._waiting.pop(row, None)) is not None:
                    buffer[:] = self._pool.row(row)
                self._watch(row)
                self._last[row] = what
                self._free.append(row)

    def check(self) -> None:
        """Fail when a row was written that was no tier's."""
        with self._lock:
            watched = sorted(self._watched)
            touched = (self._pool.rows_array[watched] != _NOBODYS).any(axis=1)
            spoilt = [row for row, is_touched in zip(watched, touched, strict=True) if is_touched]
            texts = [self._describe(row) for row in spoilt]
            for row in spoilt:
                self._watch(row)
        assert not spoilt, f"{len(spoilt)} rows of the pool were written that were not the tier's: {texts[0]}"

    def _watch(self, row: int) -> None:
        self._pool.rows_array[row] = _NOBODYS
        self._watched.add(row)

    def _describe(self, row: int) -> str:
        offset = int(np.flatnonzero(self._pool.rows_array[row] != _NOBODYS)[0])
        where = f"row {row}, from byte {offset} on"
        if row in self._last:
            return f"{where}, after the result of {self._last[row]}, whose row it was"
        return f"{where}, which lies beside the rows of jobs"


_SPARE: dict[int, list[LentRows]] = {}
"""By the size of a row: pools that no tier has rows of."""
_IN_DOUBT: list[LentRows] = []
"""Pools whose rows a tier has not given back, and may still write to."""


@contextmanager
def lent_rows(row_bytes: int) -> Iterator[LentRows]:
    """Rows for one test."""
    spare = _SPARE.setdefault(row_bytes, [])
    rows = spare.pop() if spare else LentRows(row_bytes)
    try:
        yield rows
    finally:
        (spare if rows.are_all_back else _IN_DOUBT).append(rows)
