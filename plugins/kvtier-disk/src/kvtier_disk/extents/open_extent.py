"""One open extent: its descriptors, and rows moved between them and memory.

Decides whether a call goes past the page cache. Knows no slots: where a row lies is told by the extent's shape.
"""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier_disk.extents.form import Shape
from kvtier_disk.extents.group_sync import GroupSync

_MAX_BUFFERS = 512  # in one call; the kernel takes 1024


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

    def move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        rows: Sequence[memoryview],
        offset: int,
    ) -> int:
        """Move all rows at *offset* with ``preadv`` or ``pwritev``; returns how many bytes: fewer at the file's end.

        Raises ``OSError``.
        """
        fd = self.buffered if self.direct is None else self.direct
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
