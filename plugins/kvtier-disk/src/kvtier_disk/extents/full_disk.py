"""A root on a disk without any room left: how it is opened, and how extents are given back all the same.

Removing an extent from the index takes room in the journal. So, where there is none, its file is cut to nothing first;
whoever meets it then finds it lost. Decides that order alone: which extents have to go is up to ``room``.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvtier_disk.extents.bounds import Bounds
from kvtier_disk.extents.index import Index
from kvtier_disk.extents.membership import Membership
from kvtier_disk.extents.room import surplus
from kvtier_disk.extents.root import Root

_OUT_OF_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_out_of_room(error: OSError) -> bool:
    """Whether this says that the disk, or the quota, is full."""
    return error.errno in _OUT_OF_ROOM


@contextmanager
def full_disk_waits() -> Iterator[None]:
    """What finds no room on the disk is left for the next time: the stores that fail by it tell."""
    try:
        yield
    except OSError as error:
        if not is_out_of_room(error):
            raise


def join(root: Root, bounds: Bounds, name: str, row_bytes: int, description: Mapping[str, Any]) -> Membership:
    """Take part in *root*. On a full disk what is beyond *bounds* is given back first. Raises ``OSError``."""
    try:
        return root.join(name, row_bytes, description)
    except OSError as error:
        if not is_out_of_room(error) or not _shed(root, bounds, name, row_bytes):
            raise
    return root.join(name, row_bytes, description)


def cut(root: Root, index: Index, extents: Sequence[int]) -> bool:
    """Cut the files of these extents to nothing, without a word in the index. Whether any had room to give.

    Raises ``OSError``.
    """
    namespaces = index.namespaces()
    files = [
        root.files_of(namespaces[row.namespace]).cut(row.id)
        for row in index.extents()
        if row.id in extents and row.namespace in namespaces
    ]
    return any(files)


def cut_surplus(root: Root, bounds: Bounds, index: Index, mine: int) -> bool:
    """Cut what is beyond *bounds*, that of namespace *mine* last; whether that gave any room. Raises ``OSError``."""
    going = surplus(index.census(root.journal_bytes), bounds.limits_at(root.path), mine)
    return bool(going) and cut(root, index, going)


def _shed(root: Root, bounds: Bounds, name: str, row_bytes: int) -> bool:
    index = root.indexes.snapshot()
    if index is None:
        return False
    try:
        return cut_surplus(root, bounds, index, index.find_namespace(name, row_bytes).id)
    finally:
        index.database.close()
