"""What lies below a root: the directories of namespaces, and the extents in them.

Decides what is ours. A directory is, when it is no link and has a name that a namespace can have; in it, regular files
under the name of an extent. Whatever else is there (a mount point's ``lost+found``, somebody's files) is passed over
and, where it can't be read, reported. Never changes anything, and never follows a link out of the root.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier_disk.extents.form import HEADER_BYTES, MAGIC, Shape, read_header
from kvtier_disk.extents.place import is_namespace

OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
"""How files refuse to be opened that are as they should be."""
_EXTENT_NAME = re.compile(r"([0-9a-f]{10})\.ext")


@dataclass(frozen=True, kw_only=True)
class FoundExtent:
    """A regular file under the name of an extent. Numbers are unique in an index, and may be found twice on a disk."""

    namespace: str
    number: int
    path: Path
    bytes: int
    changed: float

    @property
    def id(self) -> tuple[str, int]:
        """What tells it from all others below its root."""
        return self.namespace, self.number


def is_plain_directory(path: Path) -> bool:
    """Whether *path* is a directory, and no link to one. Raises ``OSError`` when that can't be told."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def find_extents(
    root: Path, known: Collection[str], note: Callable[[str, str], None]
) -> Iterator[FoundExtent]:
    """Every extent below *root*, oldest number first in each namespace. Raises ``OSError``.

    A directory that can't be read is passed over with a *note*, unless it belongs to a namespace that is *known*: what
    is in it must not be taken for lost. A link is passed over either way.
    """
    for directory in sorted(path for path in root.iterdir() if is_namespace(path.name)):
        if directory.is_symlink():
            if not directory.is_dir():
                continue
            note(f"link {directory.name}", f"{directory} is a link: not followed, and not used")
        elif is_plain_directory(directory):
            try:
                yield from sorted(_extents_in(directory), key=lambda found: found.number)
            except PermissionError as error:
                if directory.name in known:
                    raise
                note(f"unreadable {directory.name}", f"{directory} is passed over: {error.strerror}")


def _extents_in(directory: Path) -> Iterator[FoundExtent]:
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _EXTENT_NAME.fullmatch(entry.name)
            if match is None:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # another process removed it just now
            if stat.S_ISREG(status.st_mode) and status.st_size:  # a killed removal may leave an empty file
                yield FoundExtent(
                    namespace=directory.name,
                    number=int(match[1], 16),
                    path=Path(entry.path),
                    bytes=status.st_size,
                    changed=status.st_mtime,
                )


def identify(found: FoundExtent) -> tuple[Shape | None, bool]:
    """The shape of an extent that is what its name and directory say, and whole; and whether it is kvtier's at all.

    What can't be read is not told to be. Raises ``OSError`` where nothing can be opened now, which says nothing of it.
    """
    try:
        fd = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            first = os.pread(fd, HEADER_BYTES, 0)
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise
        return None, False
    header = read_header(first)
    if header is None or (header[2], header[0]) != found.id or size < header[1].file_bytes:
        return None, first.startswith(MAGIC)
    return header[1], True
