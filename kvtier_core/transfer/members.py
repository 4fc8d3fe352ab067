"""The processes that share a pool: the scheduler and the workers.

Decides who has joined, who lives, and whether a process may be the member that another was before it. A lock on a byte
of the pool's file says that a member lives: the kernel drops it with the process, however that ends, while a process
id may be given to another. Locks belong to an open file description, so every member opens the file for itself, and
for nothing else: a mapping would keep the description, and its locks, in every child that is forked. A child closes
its copies. A library that forks without Python's hooks escapes this.
"""

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

from kvtier_core.transfer.control import SCHEDULER, ControlPage
from kvtier_core.transfer.direction import Direction

_LOCK = struct.Struct("@hhqqi4x")  # struct flock
_POLL_S = 0.005

_no_fork = threading.RLock()
"""Held while a descriptor is open that no child knows how to close."""


class Members:
    """One process's membership in a pool, until ``close``. A forked child has none: there it is closed."""

    def __init__(self, fd: int, num_workers: int) -> None:
        """Look at the file that is open as *fd*, which stays the caller's. Raises ``OSError``."""
        self._all = (SCHEDULER, *range(num_workers))
        self._own: int | None = None
        with _no_fork:
            self._fd: int | None = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            _opened.add(self)

    def join(self, member: int) -> None:
        """Be this member from now on.

        Raises ``ValueError`` when the pool has no such member, ``FileExistsError`` when a living process already is it.
        """
        if member not in self._all:
            raise ValueError(f"{describe(member)} is not one of this pool's {len(self._all) - 1} workers")
        try:
            _lock(self._open_fd, fcntl.F_OFD_SETLK, member + 1, 1)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise already_there(member) from None
        self._own = member

    def begin(self, control: ControlPage, pool_name: str) -> None:
        """Say on the control page that this member came, unless what the dead left can't be taken over.

        Raises ``OSError`` of ``EOWNERDEAD``: the scheduler came and is gone, while workers may still fill rows that
        only it knew of; or this worker died in the middle of a job, which its successor's first would settle.
        """
        assert self._own is not None, "begin follows join"
        if (wrong := self._what_the_dead_left(control, self._own)) is not None:
            missing = self.missing()
            living = [member for member in self._all if member not in (self._own, *missing)]
            raise OSError(
                errno.EOWNERDEAD,
                f"the pool {pool_name!r} can't be joined again: {wrong}. End the processes that have it "
                f"({', '.join(map(describe, living)) or 'nobody'}) and start the whole engine again",
            )
        control.note_member(self._own)

    def _what_the_dead_left(self, control: ControlPage, member: int) -> str | None:
        if control.has_come(SCHEDULER) and (member == SCHEDULER or SCHEDULER in self.missing()):
            return "its scheduler is gone, and what that knew of its rows"
        if member != SCHEDULER:
            for direction in Direction:
                if (job := control.get_unfinished(member, direction)) is not None:
                    return f"{describe(member)} died in the middle of {direction.value} job {job}"
        return None

    def wait_for_all(self, control: ControlPage, timeout_s: float) -> None:
        """Wait until all members have joined. Raises ``TimeoutError`` that says who is missing."""
        if wait_for(lambda: not self.missing(), timeout_s):
            return
        missing = self.missing()
        left = [member for member in missing if control.has_come(member)]
        texts = []
        if left:
            texts.append(
                f"{', '.join(map(describe, left))} joined the pool and left it again: see in its own output why "
                "it ended"
            )
        if never := [member for member in missing if member not in left]:
            texts.append(
                f"{', '.join(map(describe, never))} did not join the pool within {timeout_s:g} s: all processes of an "
                "engine must run on this machine, in one container, as one user, with one configuration"
            )
        raise TimeoutError("; ".join(texts))

    def missing(self) -> list[int]:
        """Members that have not joined, or are dead. Raises ``ValueError`` after ``close``, or in a forked child."""
        fd = self._open_fd
        return [member for member in self._all if member != self._own and not _is_locked(fd, member + 1, 1)]

    def close(self) -> None:
        """Be no member any more. Twice is fine."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @property
    def _open_fd(self) -> int:
        if self._fd is None:
            raise ValueError(
                "this process is no member of the pool: it was closed here, or belongs to the parent"
            )
        return self._fd


_opened: WeakSet[Members] = WeakSet()


def _close_copies() -> None:
    _no_fork.release()
    for members in list(_opened):
        members.close()
    _opened.clear()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_close_copies)


def has_members(fd: int) -> bool:
    """Whether any member lives of the pool whose file is open as *fd*, which has no lock itself."""
    return _is_locked(fd, 0, 0)


def already_there(member: int) -> FileExistsError:
    """For a member that lives already."""
    return FileExistsError(
        errno.EEXIST,
        f"{describe(member)} of this pool is already there: give every engine a pool name of its own, "
        "and every worker its own number",
    )


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


def _is_locked(fd: int, begin: int, length: int) -> bool:
    """Whether anybody else has a lock on these bytes; a *length* of 0 reaches to the end."""
    answer = _lock(fd, fcntl.F_OFD_GETLK, begin, length)
    return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _lock(fd: int, command: int, begin: int, length: int) -> bytes:
    answer = fcntl.fcntl(fd, command, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, length, 0))
    assert isinstance(answer, bytes)
    return answer
