"""The pool's memory as a file: with no name, or with one in /dev/shm.

Decides whether the memory fits before anybody touches it, so that what does not fit is a clear error at the start and
never a SIGBUS in the middle of a copy. A file without a name is a memfd, sealed against resizing; a named one has all
its pages from the beginning, appears under its name only when it is complete, and is found dead by its locks.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier_core.transfer.members import Members
from kvtier_core.transfer.memory import find_memory_limit

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX puts named shared memory
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_log = logging.getLogger("kvtier.pool")


def make_anonymous(total_bytes: int, header: bytes, what: str) -> int:
    """A descriptor of *total_bytes* of memory without a name, zeros after *header*.

    Raises ``MemoryError``, which says *what* does not fit, before any memory is taken.
    """
    limit = find_memory_limit()
    if total_bytes > limit.bytes:
        raise MemoryError(
            f"{what} does not fit: {limit.source} leaves {gib(limit.bytes)}. "
            "Set a smaller pool capacity or free memory."
        )
    fd = os.memfd_create("kvtier-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with _refused(fd, what):
        os.ftruncate(fd, total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        os.pwrite(fd, header, 0)
    return fd


def name_in_shared_memory(name: str) -> Path:
    """The path of the named memory of this user's engine *name*."""
    return SHARED_MEMORY / f"kvtier-{os.getuid()}-{name}"


def open_or_make_named(
    path: Path, total_bytes: int, header: bytes, what: str, member: int, num_workers: int
) -> tuple[int, Members] | None:
    """Join the living memory at *path* as *member*, or make it; None when somebody else was quicker: try again.

    What dead processes left at *path* is removed. Raises ``MemoryError`` when it does not fit, ``FileExistsError`` when
    a living process is *member*, ``OSError`` when *path* belongs to somebody else.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _make_named(path, total_bytes, header, what, member, num_workers)
    members = Members(fd, num_workers)
    try:
        if unlink_if_dead(fd, path, members, then=lambda: members.join(member)):
            return fd, members
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def reclaim_dead() -> None:
    """Remove what dead processes of this user left in shared memory under other names. Living ones' is not touched."""
    for path in SHARED_MEMORY.glob(f"kvtier-{os.getuid()}-*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone by now, or not ours after all
            continue
        try:
            if not unlink_if_dead(fd, path, Members(fd, 0)) and not is_at(fd, path):
                _log.warning("removed %s, which a process that died had left", path)
        finally:
            os.close(fd)


def unlink_if_dead(
    fd: int, path: Path, members: Members, *, then: Callable[[], None] | None = None, timeout_s: float = 0.0
) -> bool:
    """Whether others live in the open file, which is still at *path*; *then* is called before anybody can leave.

    Else its name, if it still has it, is gone; or nothing is known because somebody else looked for longer than
    *timeout_s*.
    """
    if not members.enter_gate(timeout_s):
        return False
    try:
        if not is_at(fd, path):
            return False
        if not members.anyone():
            path.unlink()
            return False
        if then is not None:
            then()
        return True
    finally:
        members.leave_gate()


def is_at(fd: int, path: Path) -> bool:
    """Whether *path* still names the open file."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _make_named(
    path: Path, total_bytes: int, header: bytes, what: str, member: int, num_workers: int
) -> tuple[int, Members] | None:
    fd = os.open(path.parent, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, 0o600)
    with _refused(fd, f"{what} named {path}"):
        os.posix_fallocate(fd, 0, total_bytes)
        os.pwrite(fd, header, 0)
    members = Members(fd, num_workers)
    try:
        members.join(member)  # before there is a name: whoever finds it finds it alive
        own_fds = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(
                str(fd), path, src_dir_fd=own_fds
            )  # with a directory, Python follows the link to the file
        finally:
            os.close(own_fds)
    except FileExistsError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd, members


@contextmanager
def _refused(fd: int, what: str) -> Iterator[None]:
    """Close *fd* and raise ``MemoryError`` when the kernel does not give the memory."""
    try:
        yield
    except OSError as error:
        os.close(fd)
        raise MemoryError(f"the kernel refused {what}: {error}") from error


def warn_without_huge_pages(setting: Path = _SHMEM_HUGE_PAGES) -> None:
    """Log once a pool when this kernel gives shared memory no huge pages to those who ask."""
    try:
        chosen = setting.read_text()
    except OSError:
        chosen = "[unknown]"
    if not any(word in chosen for word in ("[always]", "[within_size]", "[advise]", "[force]")):
        _log.warning(
            "huge pages were asked for, but %s says %s: the pool gets pages of 4 KiB. Write advise to it to allow them",
            setting,
            chosen.strip(),
        )


def gib(count: int) -> str:
    """A size for people."""
    return f"{count / 2**30:.2f} GiB"
