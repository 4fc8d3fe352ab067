"""Locks that a process holds as long as it lives: the kernel drops them, so that nobody waits for the dead."""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_S = 0.02


@contextmanager
def exclusively(path: Path, timeout_s: float) -> Iterator[None]:
    """Keep other processes out meanwhile. Raises ``OSError``, ``ETIMEDOUT`` when another one does so for too long."""
    give_up = time.monotonic() + timeout_s
    while (fd := _take(path)) is None:
        if time.monotonic() > give_up:
            raise OSError(
                errno.ETIMEDOUT, "another process has been opening this root for too long", str(path)
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(fd)


def _take(path: Path) -> int | None:
    """A descriptor of the locked file *path*; ``None`` when somebody else has it, or has just removed it."""
    path.parent.mkdir(exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    taken = False
    try:
        taken = _try_lock(fd) and _is_still(path, fd)
    finally:
        if not taken:
            os.close(fd)
    return fd if taken else None


def _is_still(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


class LifeSign:
    """A file that is locked as long as this object, or the process that made it, lives."""

    def __init__(self, directory: Path) -> None:
        """Make and lock it. Raises ``OSError``."""
        directory.mkdir(exist_ok=True)
        self.path = directory / f"{os.getpid()}-{secrets.token_hex(6)}"
        self._fd: int | None = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
        if not _try_lock(self._fd):
            raise OSError(errno.EDEADLK, "a new file is locked by somebody else", str(self.path))

    def end(self) -> None:
        """Give the sign up. Twice is fine."""
        if self._fd is not None:
            with suppress(OSError):
                self.path.unlink()
            os.close(self._fd)
            self._fd = None


def is_alive(path: Path) -> bool:
    """Whether the process lives that made this sign of life. Raises ``OSError`` when that can't be told."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
