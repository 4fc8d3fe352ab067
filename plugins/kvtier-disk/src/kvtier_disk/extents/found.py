"""What lies below a root: the directories of namespaces, and the extents in them.

Decides what is ours. A directory is, when it is no link, has a name that a namespace can have, and others can't change
it; in it, regular files under the name of an extent, of which the same holds. Whatever else is there (a mount point's
``lost+found``, somebody's files) is passed over and, where it can't be read or trusted, reported. Never changes
anything, and never follows a link out of the root.
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
from kvtier_disk.folder import Folder, ForeignError, Handle

OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
"""How files refuse to be opened that are as they should be."""
_EXTENT_NAME = re.compile(r"([0-9a-f]{10})\.ext")


@dataclass(frozen=True, kw_only=True)
class FoundExtent:
    """A regular file under the name of an extent. Numbers are unique in an index, and may be found twice on a disk."""

    namespace: str
    number: int
    folder: Folder
    name: str
    bytes: int
    changed: float

    @property
    def path(self) -> Path:
        """Where it is, for messages."""
        return self.folder.path / self.name

    @property
    def id(self) -> tuple[str, int]:
        """What tells it from all others below its root."""
        return self.namespace, self.number


def find_extents(
    root: Folder, known: Collection[str], note: Callable[[str, str], None]
) -> Iterator[FoundExtent]:
    """Every extent below *root*, oldest number first in each namespace. Raises ``OSError``.

    A directory that can't be read is passed over with a *note*, unless it belongs to a namespace that is *known*: what
    is in it must not be taken for lost. A link, and what others could change, is passed over either way.
    """
    with root.opened() as handle:
        names = sorted(entry.name for entry in handle.entries() if is_namespace(entry.name))
    for name in names:
        folder = root.sub(name)
        try:
            with folder.opened() as handle:
                found = sorted(_extents_in(folder, handle, note), key=lambda found: found.number)
        except FileNotFoundError:
            continue
        except ForeignError as error:
            note(f"foreign {name}", f"{folder.path} is passed over: {error.strerror}")
        except PermissionError as error:
            if name in known:
                raise
            note(f"unreadable {name}", f"{folder.path} is passed over: {error.strerror}")
        except NotADirectoryError:
            if folder.path.is_dir():
                note(f"link {name}", f"{folder.path} is a link: not followed, and not used")
        else:
            yield from found


def _extents_in(folder: Folder, handle: Handle, note: Callable[[str, str], None]) -> Iterator[FoundExtent]:
    for entry in handle.entries():
        match = _EXTENT_NAME.fullmatch(entry.name)
        if match is None:
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # another process removed it just now
        if not stat.S_ISREG(status.st_mode) or not status.st_size:  # a killed removal may leave an empty file
            continue
        problem = handle.problem(status)
        if problem is not None:
            note(
                f"foreign {folder.path.name}/{entry.name}",
                f"{folder.path / entry.name} is passed over: {problem}",
            )
            continue
        yield FoundExtent(
            namespace=folder.path.name,
            number=int(match[1], 16),
            folder=folder,
            name=entry.name,
            bytes=status.st_size,
            changed=status.st_mtime,
        )


def identify(found: FoundExtent) -> tuple[Shape | None, bool]:
    """The shape of an extent that is what its name and directory say, and whole; and whether it is kvtier's at all.

    What can't be read is not told to be. Raises ``OSError`` where nothing can be opened now, which says nothing of it.
    """
    try:
        with found.folder.opened() as handle:
            fd = handle.open_file(found.name)
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
