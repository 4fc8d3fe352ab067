"""Temporary files, which their writers lock so that nobody takes them for leftovers.

Decides who still writes. Bytes never depend on it.
"""

import contextlib
import fcntl
import os
import time

from kvtier_disk.folder import ForeignError, Handle, StrangerError, write_all

_STALE_AFTER_S = 600.0  # where the file system has no locks, a temporary file this old has no writer any more


def write_new(handle: Handle, name: str, content: memoryview) -> None:
    """Write *content* to a file that nobody else has, locked meanwhile. Raises ``OSError``; a part may be left then."""
    fd = handle.make_file(name, os.O_WRONLY)
    try:
        _lock(fd)
        write_all(fd, content)
    finally:
        os.close(fd)


def has_writer(handle: Handle, name: str) -> bool:
    """Whether the temporary file *name* may still be being written. The kernel drops the locks of dead processes.

    Raises ``OSError``.
    """
    try:
        fd = handle.open_file(name)
    except FileNotFoundError:
        return True  # renamed just now
    except (StrangerError, ForeignError):
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
    """Show other processes that this file has a writer, as far as the file system can."""
    with contextlib.suppress(OSError):  # without locks leftovers are told by their age
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
