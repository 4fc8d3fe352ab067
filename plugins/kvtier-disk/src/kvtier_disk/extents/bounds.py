"""What the settings allow a root to take, and the shape of extents that follows from it.

Decides sizes alone; what has to go is up to ``room``.
"""

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from kvtier_disk.extents.census import BASE_BYTES, SLOT_BYTES
from kvtier_disk.extents.form import Shape
from kvtier_disk.extents.room import Limits

_SHARE_OF_DESCRIPTORS = 4
"""One of so many: the rest is the engine's, whose sockets must not fail because a tier keeps files open."""
_DESCRIPTORS_AN_EXTENT = 2  # with O_DIRECT and without
_SMALLEST_SHARE = 8
"""An extent is no more than this part of the room for blocks, so that there are a few to choose from."""
_FIRST_EXTENT = 4 << 20
"""Bytes of a namespace's first extent. Later ones double what it has, so that few blocks don't take much room."""
_MIN_FREE, _SHARE_FREE = 1 << 30, 20
"""What stays free unless set otherwise: this many bytes, or one of so many parts of a small file system."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What the settings allow. ``None`` means without bound."""

    capacity: int | None
    min_free: int | None
    """``None`` stands for the default, which depends on the file system."""
    extent_bytes: int
    ttl: float | None

    def limits_at(self, root: Path) -> Limits:
        """What *root* may take now, with what its file system has left. Raises ``OSError``."""
        status = os.statvfs(root)
        return Limits(
            capacity=self.capacity,
            free_bytes=status.f_bavail * status.f_frsize,
            min_free=min_free_of(status, self.min_free),
        )


def extents_to_keep_open() -> int:
    """How many extents may stay open in this process: for a quarter of its descriptors, one at least."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, soft // _SHARE_OF_DESCRIPTORS // _DESCRIPTORS_AN_EXTENT)


def min_free_of(status: os.statvfs_result, setting: int | None) -> int:
    """Bytes that stay free on this file system."""
    if setting is not None:
        return setting
    return min(_MIN_FREE, status.f_blocks * status.f_frsize // _SHARE_FREE)


def shape_for(row_bytes: int, bounds: Bounds, journal_bytes: int, *, held: int, disk_bytes: int) -> Shape:
    """The shape of the next extent of a namespace whose extents take *held*, on a file system of *disk_bytes*."""
    room = disk_bytes if bounds.capacity is None else min(disk_bytes, bounds.capacity)
    share = (room - BASE_BYTES - journal_bytes) // _SMALLEST_SHARE
    return Shape.fitting(row_bytes, min(bounds.extent_bytes, share, max(_FIRST_EXTENT, held)))


def bytes_of_disk(path: Path) -> int:
    """The size of the file system that *path* is on. Raises ``OSError``."""
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize


def least_capacity(row_bytes: int, journal_bytes: int) -> int:
    """The smallest capacity with which one block can be kept."""
    shape = Shape(row_bytes=row_bytes, slots=1)
    return shape.file_bytes + SLOT_BYTES + BASE_BYTES + journal_bytes
