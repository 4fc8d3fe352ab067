"""Opens files and makes directories under names where somebody else may have put anything.

Decides what counts as a file of ours: a regular file under its own name. Never follows a link, never waits for the
other end of a pipe, and never decides what becomes of a stranger: that is ``FileLayout``'s.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

_STALE_AFTER_S = 600.0  # where the file system has no locks, a temporary file this old has no writer any more
# How links, sockets and devices without a driver refuse to be opened.
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV})


class StrangerError(Exception):
    """What stands under a name of ours is no regular file."""


def open_to_read(path: Path) -> int:
    """A descriptor of the regular file *path*. Raises ``StrangerError`` for anything else, and ``OSError``."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise StrangerError("is no regular file") from error
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise StrangerError("is no regular file")


def write_new(path: Path, content: memoryview) -> None:
    """Write *content* to a file that nobody else has, locked meanwhile. Raises ``OSError``; a part may be left then."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _lock(fd)
        done = 0
        while done < len(content):
            done += os.write(fd, content[done:])
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make the directory *path* in one that exists. What else has the name is removed. Raises ``OSError``."""
    try:
        path.mkdir()
    except FileExistsError:
        if stat.S_ISDIR(path.lstat().st_mode):
            return
        path.unlink(missing_ok=True)
        path.mkdir(exist_ok=True)


def has_writer(path: Path) -> bool:
    """Whether the temporary file *path* may still be being written. The kernel drops the locks of dead processes.

    Raises ``OSError``.
    """
    try:
        fd = open_to_read(path)
    except FileNotFoundError:
        return True  # renamed just now
    except StrangerError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return time.time() - os.fstat(fd).st_mtime < _STALE_AFTER_S
    finally:
        os.close(fd)
    return False


def _lock(fd: int) -> None:
    """Show other processes that this file has a writer, as far as the file system can. Bytes never depend on it."""
    with contextlib.suppress(OSError):  # without locks leftovers are told by their age
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
