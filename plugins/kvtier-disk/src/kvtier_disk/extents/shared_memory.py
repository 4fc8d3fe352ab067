"""The memory that processes with one SQLite index share (its ``-shm`` file), on the disk before SQLite maps it.

SQLite makes that file by one byte in each of its pages. Where the file system's blocks are smaller, the rest is a
hole, and a write into the mapping that finds no room for it ends the process with SIGBUS. Here all of it is written
before, so that a full disk is an error of a call. SQLite empties the file when it believes itself to be the first; a
read lock on the byte that it looks at says that somebody was before it. That lock belongs to the open file (OFD): a
lock of the process's would not be seen by SQLite within the process.

Decides only what is on the disk; what the memory says is SQLite's. One descriptor a file and process stays open until
the last connection is closed: closing any descriptor of a file drops SQLite's own locks on it.
"""

import errno
import fcntl
import os
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ALLOCATED_BYTES = 64 << 10
"""Enough for a journal of 8,158 pages (32 MiB), far beyond what is ever promised to one."""
_FIRST_BYTE = 128  # SQLite's "dead man switch"
_LOCK = struct.Struct("hhqqi4x")  # struct flock
_HEADER = struct.Struct("=16xI76xI")  # as documented in "WAL-mode File Format": mxFrame, nBackfill
_guard = threading.Lock()


@dataclass
class _Held:
    fd: int
    users: int


_held: dict[tuple[int, int], _Held] = {}


def _forget_after_fork() -> None:
    """The parent's descriptors are none of the child's business, and nobody will release the lock."""
    global _guard  # noqa: PLW0603 - a lock that another thread of the parent held can't be used any more
    _guard = threading.Lock()
    for held in _held.values():
        os.close(held.fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


class SharedMemory:
    """The file of one database, held for one connection. Safe from any thread."""

    def __init__(self, database: Path) -> None:
        """Make the file of *database*, which exists, if it is missing. Raises ``OSError``, such as ``ENOSPC``."""
        path = Path(f"{database}-shm")
        with _guard:
            self._key = _identity(path)
            if self._key not in _held:
                self._key, fd = _make(path, database)
                _held[self._key] = _Held(fd, 0)
            self._mine = _held[self._key]
            self._mine.users += 1

    def pages(self) -> tuple[int, int]:
        """Pages in the journal, and how many of them have been merged into the file. Raises ``OSError``."""
        header = os.pread(self._mine.fd, _HEADER.size, 0)
        written, merged = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        return written, merged

    def release(self) -> None:
        """The connection is closed. Once."""
        with _guard:
            self._mine.users -= 1
            if self._mine.users == 0 and _held.get(self._key) is self._mine:
                del _held[self._key]
                os.close(self._mine.fd)


def _identity(path: Path) -> tuple[int, int]:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return (0, 0)
    return status.st_dev, status.st_ino


def _make(path: Path, database: Path) -> tuple[tuple[int, int], int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        if _lock(fd, fcntl.F_WRLCK):
            _fill(fd, database)
        _lock(fd, fcntl.F_RDLCK)
        status = os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise
    return (status.st_dev, status.st_ino), fd


def _fill(fd: int, database: Path) -> None:
    """Nobody else uses the file: empty it, as SQLite does, and let it have all its blocks."""
    owner = database.stat()
    with suppress(PermissionError):  # as far as SQLite would: who may write the index may write this
        os.fchmod(fd, owner.st_mode & 0o777)
        if os.geteuid() == 0:
            os.fchown(fd, owner.st_uid, owner.st_gid)
    os.ftruncate(fd, 0)
    try:
        done = 0
        while done < ALLOCATED_BYTES:
            done += os.pwrite(fd, bytes(ALLOCATED_BYTES - done), done)
    except OSError:
        os.ftruncate(fd, 0)
        raise


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, _FIRST_BYTE, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
