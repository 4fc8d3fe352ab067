"""Who shares a pool: one scheduler and its workers, each alive as long as it holds its lock.

Decides who has joined and who lives. A lock on a byte of the pool's file says so: the kernel drops it with the process,
however that ends, and a process id can mean somebody else. The bytes' contents are not touched. Locks belong to an
open file description, so every member opens the file for itself, and for nothing else: a mapping would keep the
description, and its locks, in every child that is forked.
"""

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from kvtier_core.transfer.forks import own

SCHEDULER = -1
"""The member that decides; workers are members 0, 1, ..."""

_LOCK = struct.Struct("@hhqqi4x")  # struct flock
_GATE = 1 << 20
"""A byte far above any member's: whoever holds its lock may look and act without being interrupted."""
_POLL_S = 0.005


class Members:
    """One process's membership in a pool, until ``close``. A forked child has none: there it is closed."""

    @classmethod
    def of(cls, fd: int, num_workers: int) -> Self:
        """Look at the file that is open as *fd*, which stays the caller's. Raises ``OSError``."""
        return own(partial(cls, fd, num_workers))

    def __init__(self, fd: int, num_workers: int) -> None:
        self._open_fd: int | None = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._all = (SCHEDULER, *range(num_workers))
        self._own: int | None = None

    def join(self, member: int) -> None:
        """Be this member from now on.

        Raises ``ValueError`` when the pool has no such member, ``FileExistsError`` when a living process already is it.
        """
        if member not in self._all:
            raise ValueError(f"{describe(member)} is not one of this pool's {len(self._all) - 1} workers")
        if not self._lock(member + 1):
            raise FileExistsError(
                errno.EEXIST,
                f"{describe(member)} of this pool is already there: give every engine a pool name of its own, "
                "and every worker its own number",
            )
        self._own = member

    def close(self) -> None:
        """Be no member any more. Twice is fine."""
        if self._open_fd is not None:
            os.close(self._open_fd)
            self._open_fd = None

    @property
    def is_closed(self) -> bool:
        """Whether this process speaks for no member: after ``close``, and in a forked child."""
        return self._open_fd is None

    @property
    def _fd(self) -> int:
        if self._open_fd is None:
            raise ValueError(
                "this process is no member of the pool: it was closed here, or belongs to the parent"
            )
        return self._open_fd

    def missing(self) -> list[int]:
        """The members that have not joined, or are dead."""
        return [member for member in self._others() if not self._is_locked(member + 1, 1)]

    def present(self) -> list[int]:
        """The other members that live."""
        return [member for member in self._others() if self._is_locked(member + 1, 1)]

    def _others(self) -> list[int]:
        return [
            member for member in self._all if member != self._own
        ]  # the kernel does not tell one's own locks

    def anyone(self) -> bool:
        """Whether any other living process is a member, of however large an engine."""
        return self._is_locked(0, _GATE)

    def enter_gate(self, timeout_s: float) -> bool:
        """Keep others out until ``leave_gate``; False when somebody else did that for too long."""
        return wait_for(lambda: self._lock(_GATE), timeout_s)

    def leave_gate(self) -> None:
        """Let the next one in."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, _GATE, 1, 0))

    def _lock(self, byte: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _is_locked(self, byte: int, length: int) -> bool:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, length, 0)
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked)
        assert isinstance(answer, bytes)
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def describe(member: int) -> str:
    """A member's name, for messages."""
    return "the scheduler" if member == SCHEDULER else f"worker {member}"


def wait_for(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Ask again and again, with short sleeps, for what other processes do at the start. Whether it came in time."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
