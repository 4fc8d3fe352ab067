"""How one object is written, found, listed and removed, on the two kinds of file system there are.

*Object stores* (``WholePuts``) show an object when its put is complete, and not before. *File systems proper*
(``MovedFiles``) show a file while it grows: it is written under a name of its own and moved. Either way readers find
a complete object or none, whatever happens to the writer. Decides nothing about the names of blocks: absence is an
answer, everything else is raised as it comes.
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from kvtier_fsspec.many import Requests

_TEMPORARY = ".tmp"
_TEMPORARY_NAME = re.compile(r"(?:.*/)?(?:[^/]+\.[0-9a-f]{32}|(?:keeper|uses)/[0-9a-f]{8,})\.tmp")
"""Of a file that is moved to its place, and of what engines of a bucket tell each other."""
_STALE_AFTER_S = 3600.0  # more than a store may take and clocks may differ
_FOLDERS_A_TIME = 8
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


@dataclass(frozen=True)
class Found:
    """One object of a listing. ``time`` is seconds since the epoch; that of the listing where none is given."""

    path: str
    size: int
    time: float

    @property
    def is_temporary(self) -> bool:
        """Whether kvtier makes files or objects of that name for a while."""
        return _TEMPORARY_NAME.fullmatch(self.path) is not None

    @property
    def is_leftover(self) -> bool:
        """Whether the writer of a temporary one is gone."""
        return self.is_temporary and time.time() - self.time > _STALE_AFTER_S


class Publisher(Protocol):
    """What the layout asks of a file system. Safe from any thread; *fs* is the object in use now."""

    def put(self, fs: AbstractFileSystem, path: str, content: bytes) -> None:
        """Write one object, replacing one of that name; after an exception nothing short is to be seen."""
        ...

    def entries(self, fs: AbstractFileSystem, directory: str) -> Iterator[Found]:
        """Every object in the folders of *directory*."""
        ...

    def remove_all(self, fs: AbstractFileSystem, directory: str) -> None:
        """Remove *directory* and everything in it; its absence is fine."""
        ...

    def remove_empty(self, fs: AbstractFileSystem, directory: str) -> None:
        """Remove *directory* and its folders as far as nothing is in them."""
        ...


class WholePuts:
    """Object stores: a put is visible whole or not at all."""

    def __init__(self, requests: Requests) -> None:
        """No I/O."""
        self._requests = requests

    def put(self, fs: AbstractFileSystem, path: str, content: bytes) -> None:
        """One request; past the file system's limit for one, a multipart upload, completed or aborted."""
        fs.pipe_file(path, content)

    def entries(self, fs: AbstractFileSystem, directory: str) -> Iterator[Found]:
        """Eight folders at a time. Cost: a request, one for each folder and one per 1,000 objects; memory for eight."""
        folders = folders_in(fs, directory)
        for begin in range(0, len(folders), _FOLDERS_A_TIME):
            part = folders[begin : begin + _FOLDERS_A_TIME]
            for listed in self._requests.call_each(fs, "find", part, maxdepth=1, detail=True):
                if _is_fault(listed):
                    raise listed
                if isinstance(listed, Mapping):
                    yield from _found(listed.values())

    def remove_all(self, fs: AbstractFileSystem, directory: str) -> None:
        """Object by object: bulk deletes of some file systems don't tell what they could not delete."""
        remove_each(fs, fs.find(directory), self._requests)

    def remove_empty(self, fs: AbstractFileSystem, directory: str) -> None:
        """Object stores have no folders."""


class MovedFiles:
    """File systems with files that grow, folders, and a move that replaces its target at once."""

    def __init__(self, requests: Requests) -> None:
        """No I/O."""
        self._requests = requests
        self._made: set[str] = set()  # folders; single operations of a set are thread-safe

    def put(self, fs: AbstractFileSystem, path: str, content: bytes) -> None:
        """Written beside its place under a name nobody else has, then moved."""
        folder = path.rpartition("/")[0]
        temporary = f"{path}.{secrets.token_hex(16)}{_TEMPORARY}"
        try:
            if folder not in self._made:
                fs.makedirs(folder, exist_ok=True)
                self._made.add(folder)
            fs.pipe_file(temporary, content)
            _move(fs, temporary, path)
        except BaseException:
            self._made.discard(folder)  # somebody may have removed it
            with contextlib.suppress(Exception):  # no reader looks at it, and a later listing removes it
                fs.rm_file(temporary)
            raise

    def entries(self, fs: AbstractFileSystem, directory: str) -> Iterator[Found]:
        """Folder by folder."""
        for folder in folders_in(fs, directory):
            try:
                yield from _found(fs.ls(folder, detail=True))
            except FileNotFoundError:
                continue  # removed just now

    def remove_all(self, fs: AbstractFileSystem, directory: str) -> None:
        """The folder with all that is in it."""
        self._made.clear()
        with contextlib.suppress(FileNotFoundError):
            fs.rm(directory, recursive=True)

    def remove_empty(self, fs: AbstractFileSystem, directory: str) -> None:
        """On local disks alone: elsewhere removing a folder may remove what is in it."""
        if not isinstance(fs, LocalFileSystem):
            return
        for folder in [*(entry["name"] for entry in fs.ls(directory, detail=True)), directory]:
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # noqa: PTH106 - the file system's own would not refuse a link


def sizes(fs: AbstractFileSystem, paths: Sequence[str], requests: Requests) -> list[int | Exception | None]:
    """The size of each object; ``None`` where there is none. A fault stands for its answer."""
    return [_size_of(info) for info in requests.call_each(fs, "info", paths)]


def moves_files(fs: AbstractFileSystem) -> bool:
    """Whether *fs* has a move of its own; the one all inherit copies and deletes."""
    return type(fs).mv is not AbstractFileSystem.mv


def remove_each(fs: AbstractFileSystem, paths: Sequence[str], requests: Requests) -> None:
    """Remove objects; absent ones are fine. Tries all, then raises the first fault."""
    for outcome in requests.call_each(fs, "rm_file", paths):
        if _is_fault(outcome):
            raise outcome


def _move(fs: AbstractFileSystem, source: str, target: str) -> None:
    if isinstance(fs, LocalFileSystem):
        os.replace(source, target)  # noqa: PTH105 - what the file system offers copies when it can't rename
    else:
        fs.mv(source, target)


def folders_in(fs: AbstractFileSystem, directory: str) -> list[str]:
    """The paths of the folders of *directory*."""
    return [entry["name"] for entry in fs.ls(directory, detail=True) if entry["type"] == "directory"]


def _is_fault(outcome: object) -> bool:
    """Whether a call ended with an exception that does not say that nothing is there."""
    return isinstance(outcome, BaseException) and not isinstance(outcome, FileNotFoundError)


def _size_of(info: Mapping[str, Any] | Exception) -> int | Exception | None:
    if isinstance(info, FileNotFoundError):
        return None
    if isinstance(info, Exception):
        return info
    return int(info["size"]) if info["type"] == "file" else None


def _found(infos: Iterable[Mapping[str, Any]]) -> Iterator[Found]:
    now = time.time()
    for info in infos:
        if info["type"] == "file":
            yield Found(path=info["name"], size=info["size"], time=_time_of(info, now))


def _time_of(info: Mapping[str, Any], now: float) -> float:
    """File systems have many names for the time of the last change, and give a number, an object or a text."""
    value = next((info[name] for name in _TIMES if info.get(name) is not None), now)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        # Without a zone, file systems mean UTC.
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return float(value)
