"""Locks that a process holds as long as it lives: the kernel drops them, so that nobody waits for the dead.

They are the process's own (``lockf``), as SQLite's are. Those of ``flock`` and of open file descriptions would live on
in a child that was forked at any moment, also by a library that runs no hook of Python's, and speak for a dead parent.
What process locks lack is made up for here: they don't keep out threads of the same process, which take turns by a
mutex for each file; and closing any descriptor of a file drops them, so that none is opened again where it is held.
"""

import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_S = 0.02

_guard = threading.Lock()
_turns: dict[str, threading.Lock] = {}  # by the real path of a lock file
_own_signs: set[tuple[int, int]] = set()


def _forget_after_fork() -> None:
    """The child has none of the parent's locks, nor the threads that might release a mutex."""
    global _guard  # noqa: PLW0603 - it may be held by such a thread
    _guard = threading.Lock()
    _turns.clear()
    _own_signs.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


@contextmanager
def exclusively(path: Path, timeout_s: float) -> Iterator[None]:
    """Keep other processes out meanwhile. Raises ``OSError``, ``ETIMEDOUT`` when another one does so for too long."""
    give_up = time.monotonic() + timeout_s
    with _guard:
        turn = _turns.setdefault(os.path.realpath(path), threading.Lock())
    if not turn.acquire(timeout=timeout_s):
        raise _too_long(path)
    try:
        while (fd := _take(path)) is None:
            if time.monotonic() > give_up:
                raise _too_long(path)
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            os.close(fd)
    finally:
        turn.release()


def _too_long(path: Path) -> OSError:
    return OSError(
        errno.ETIMEDOUT, "another process has kept this root locked for too long: is one stopped?", str(path)
    )


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
    """A file that is locked as long as this object, or the process that made it, lives. A fork has no part in it."""

    def __init__(self, directory: Path) -> None:
        """Make and lock it. Raises ``OSError``."""
        directory.mkdir(exist_ok=True)
        self.path = directory / f"{os.getpid()}-{secrets.token_hex(6)}"
        self._fd: int | None = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
        if not _try_lock(self._fd):
            os.close(self._fd)
            raise OSError(errno.EDEADLK, "a new file is locked by somebody else", str(self.path))
        self._pid = os.getpid()
        self._identity = _identity(os.fstat(self._fd))
        with _guard:
            _own_signs.add(self._identity)

    def end(self) -> None:
        """Give the sign up, unless it is another process's. Twice is fine."""
        if self._fd is not None:
            if self._pid == os.getpid():
                with suppress(OSError):
                    self.path.unlink()
                with _guard:
                    _own_signs.discard(self._identity)
            os.close(self._fd)
            self._fd = None


def is_alive(path: Path) -> bool:
    """Whether the process lives that made this sign of life. Raises ``OSError`` when that can't be told."""
    try:
        with _guard:
            if _identity(path.lstat()) in _own_signs:
                return True
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(fd)
    finally:
        os.close(fd)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _try_lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
