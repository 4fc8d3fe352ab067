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

from kvtier_disk.folder import Folder, ForeignError, StrangerError

_POLL_S = 0.02
_LOCK = "lock"

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
def exclusively(folder: Folder, timeout_s: float) -> Iterator[None]:
    """Keep other processes out of *folder* meanwhile, by its file ``lock``; both are made where they are missing.

    Raises ``OSError``, ``ETIMEDOUT`` when another one does so for too long.
    """
    give_up = time.monotonic() + timeout_s
    with _guard:
        turn = _turns.setdefault(os.path.realpath(folder.path), threading.Lock())
    if not turn.acquire(timeout=timeout_s):
        raise _too_long(folder)
    try:
        while (fd := _take(folder)) is None:
            if time.monotonic() > give_up:
                raise _too_long(folder)
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            os.close(fd)
    finally:
        turn.release()


def _too_long(folder: Folder) -> OSError:
    return OSError(
        errno.ETIMEDOUT,
        "another process has kept this root locked for too long: is one stopped?",
        str(folder.path / _LOCK),
    )


def _take(folder: Folder) -> int | None:
    """A descriptor of the locked file; ``None`` when somebody else has it, or has just made or removed it."""
    folder.make()
    with folder.opened() as handle:
        try:
            fd = handle.open_file(_LOCK, os.O_RDWR)
        except FileNotFoundError:
            try:
                fd = handle.make_file(_LOCK)
            except FileExistsError:
                return None
        taken = False
        try:
            taken = _try_lock(fd) and os.path.samestat(os.fstat(fd), handle.status(_LOCK))
        except FileNotFoundError:
            return None
        finally:
            if not taken:
                os.close(fd)
    return fd if taken else None


class LifeSign:
    """A file that is locked as long as this object, or the process that made it, lives. A fork has no part in it."""

    def __init__(self, folder: Folder) -> None:
        """Make and lock it in *folder*, which is made where it is missing. Raises ``OSError``."""
        self.name = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._folder = folder
        folder.make()
        with folder.opened() as handle:
            self._fd: int | None = handle.make_file(self.name)
        if not _try_lock(self._fd):
            os.close(self._fd)
            raise OSError(
                errno.EDEADLK, "a new file is locked by somebody else", str(folder.path / self.name)
            )
        self._pid = os.getpid()
        self._identity = _identity(os.fstat(self._fd))
        with _guard:
            _own_signs.add(self._identity)

    def end(self) -> None:
        """Give the sign up, unless it is another process's. Twice is fine."""
        if self._fd is not None:
            if self._pid == os.getpid():
                with suppress(OSError), self._folder.opened() as handle:
                    handle.unlink(self.name)
                with _guard:
                    _own_signs.discard(self._identity)
            os.close(self._fd)
            self._fd = None


def is_alive(folder: Folder, name: str) -> bool:
    """Whether the process lives that made this sign of life in *folder*. Raises ``OSError`` when that can't be told."""
    try:
        with folder.opened() as handle:
            with _guard:
                if _identity(handle.status(name)) in _own_signs:
                    return True
            fd = handle.open_file(name, os.O_RDWR)
    except (
        FileNotFoundError,
        StrangerError,
        ForeignError,
    ):  # what kvtier has not made is nobody's sign of life
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
