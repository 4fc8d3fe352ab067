"""One open extent: its descriptors, and rows moved between them and memory.

Decides what comes from the page cache and what goes past it. Knows no slots: where a row lies is told by the extent's
shape.
"""

import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from kvtier_disk.extents.form import Shape
from kvtier_disk.extents.group_sync import GroupSync
from kvtier_disk.extents.page_cache import cached_share

_MAX_BUFFERS = 512  # in one call; the kernel takes 1024
_ENOUGH_CACHED = 0.75
"""Of a row, for a read through the page cache. The kernel takes back pieces of a file, 64 KiB here and there, and a
large row is soon not whole. A call reads what is missing piece by piece: where much is, a direct read is faster.
"""
_STEP_BYTES = 2 << 20
"""Read into the page cache between two looks at the clock."""


@dataclass(eq=False)
class OpenExtent:
    """An extent that stays open as long as it has users, or is one of the last used."""

    shape: Shape
    buffered: int = -1
    direct: int | None = None
    identity: os.stat_result = field(init=False)
    users: int = 0
    descriptors: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.group = GroupSync(lambda: os.fdatasync(self.buffered))

    def keep(self, fd: int) -> int:
        """*fd*, which is closed with the extent."""
        self.descriptors.append(fd)
        return fd

    def close(self) -> None:
        """Close the descriptors. Twice is fine."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors.clear()

    def read(self, rows: Sequence[memoryview], offset: int) -> int:
        """Fill *rows* from *offset*, through the page cache what it holds most of; returns how many, as ``move``.

        Raises ``OSError``.
        """
        total = 0
        for is_cached, part in self._parts(rows, offset):
            done = self.move(os.preadv, part, offset + total, cached=is_cached)
            total += done
            if done < len(part) * self.shape.row_bytes:
                break
        return total

    def _parts(self, rows: Sequence[memoryview], offset: int) -> list[tuple[bool, Sequence[memoryview]]]:
        """*rows* in pieces, of which the page cache holds enough or not."""
        row_bytes = self.shape.row_bytes
        share = 0.0 if self.direct is None else cached_share(self.buffered, offset, len(rows) * row_bytes)
        if share in (0.0, 1.0):
            return [(share == 1.0, rows)]
        known = [
            cached_share(self.buffered, offset + index * row_bytes, row_bytes) >= _ENOUGH_CACHED
            for index in range(len(rows))
        ]
        pieces = groupby(zip(known, rows, strict=True), key=itemgetter(0))
        return [(is_cached, [row for _, row in piece]) for is_cached, piece in pieces]

    def read_into_cache(self, until: float) -> None:
        """Read the extent into the page cache, and touch it there; stop at *until* (monotonic). Raises ``OSError``.

        Memory that no processor has touched yet can be slow to read on a virtual machine (docs/decisions.md).
        """
        os.posix_fadvise(self.buffered, 0, 0, os.POSIX_FADV_NORMAL)  # read ahead from now on
        size, done = os.fstat(self.buffered).st_size, 0
        with mmap.mmap(-1, _STEP_BYTES) as nowhere:
            while done < size and time.monotonic() < until:
                done += os.preadv(self.buffered, [nowhere], done) or size

    def move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        rows: Sequence[memoryview],
        offset: int,
        *,
        cached: bool = False,
    ) -> int:
        """Move all rows at *offset* with ``preadv`` or ``pwritev``; returns how many bytes: fewer at the file's end.

        Through the page cache where they are *cached*. Raises ``OSError``.
        """
        fd = self.buffered if self.direct is None or cached else self.direct
        size = sum(map(len, rows))
        total = 0
        waiting = list(rows)
        while waiting:
            try:
                done = call(fd, waiting[:_MAX_BUFFERS], offset + total)
            except OSError as error:
                if error.errno != errno.EINVAL or fd == self.buffered:
                    raise
                fd = self.buffered  # memory that is not aligned; the engine's rows are
                continue
            if done == 0:
                break
            total += done
            if total == size:
                break
            while waiting and done >= len(waiting[0]):
                done -= len(waiting.pop(0))
            if done:
                waiting[0] = waiting[0][done:]
                fd = self.buffered  # a part of a row is not aligned any more
        return total


def write_at(fd: int, content: bytes, offset: int) -> None:
    """Write all of *content* at *offset*. Raises ``OSError``; a part may be written then."""
    done = 0
    while done < len(content):
        done += os.pwrite(fd, content[done:], offset + done)
