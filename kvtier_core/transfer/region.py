"""The pool's memory as a file: with no name, or with one in /dev/shm.

Decides whether the memory fits before anybody touches it, so that what does not fit is a clear error at the start and
never a SIGBUS in the middle of a copy; and whether a named file may be trusted. A file without a name is a memfd,
sealed against resizing. A named one can't be sealed (the kernel seals memfds alone): it must be this user's and nobody
else's to write. It has its name before its pages, so that of several who come at once one takes them, and keeps others
out until it has them all. It is found dead by its locks; and once all have come and its name is gone, it is found by
what its living members have open.
"""

import enum
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvtier_core.transfer.members import Members
from kvtier_core.transfer.memory import find_memory_limit, format_size

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX puts named shared memory
MAGIC = b"kvtpool"
"""What every pool of any version begins with."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PRIVATE = 0o600
_OPEN = (
    os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
)  # the last: a pipe would wait for its other end

_log = logging.getLogger("kvtier.pool")


def make_anonymous(total_bytes: int, header: bytes, what: str) -> int:
    """A descriptor of *total_bytes* of memory without a name, zeros after *header*.

    Raises ``MemoryError``, which says *what* does not fit, before any memory is taken.
    """
    _check_fits(total_bytes, what)
    fd = os.memfd_create("kvtier-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with _refused(what):
            os.fchmod(
                fd, _PRIVATE
            )  # a new memfd is everybody's, for who may look into a process's descriptors
            os.ftruncate(fd, total_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            os.pwrite(fd, header, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def name_in_shared_memory(name: str) -> Path:
    """The path of the named memory of this user's engine *name*."""
    return SHARED_MEMORY / f"kvtier-{os.geteuid()}-{name}"


def open_or_make_named(
    path: Path, total_bytes: int, header: bytes, what: str, member: int, num_workers: int
) -> tuple[int, Members] | None:
    """Join the living memory that has or had the name *path* as *member*, or make it.

    None when somebody else was quicker: try again.

    The pool that dead processes left at *path* is removed. Raises ``MemoryError`` when it does not fit,
    ``FileExistsError`` when a living process is *member*, ``OSError`` when *path* is no pool of this user's alone.
    """
    with ExitStack() as on_failure:
        try:
            fd = os.open(path, _OPEN)
        except FileNotFoundError:
            return _join_nameless(path, member, num_workers) or _make_named(
                path, total_bytes, header, what, member, num_workers
            )
        except PermissionError as error:
            raise _taken(path, "this user may not open") from error
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV):
                raise
            raise _taken(path, "is no regular file but a link, a directory, a socket or a device") from error
        on_failure.callback(os.close, fd)
        if (wrong := _what_is_wrong(fd)) is not None:
            raise _taken(path, wrong)
        members = Members.of(fd, num_workers)
        on_failure.callback(members.close)
        found = unlink_if_dead(fd, path, members, then=lambda: members.join(member))
        if found is not Found.ALIVE:
            return None
        on_failure.pop_all()
        return fd, members


def _join_nameless(path: Path, member: int, num_workers: int) -> tuple[int, Members] | None:
    """Join the pool that had the name *path* until all had come, where a living member can be seen; else None."""
    for link in _find_unlinked(path):
        with ExitStack() as on_failure:
            try:
                fd = os.open(link, _OPEN & ~os.O_NOFOLLOW)
            except OSError:  # its process is gone by now
                continue
            on_failure.callback(os.close, fd)
            if _what_is_wrong(fd) is not None:
                continue
            members = Members.of(fd, num_workers)
            on_failure.callback(members.close)
            if members.anyone():  # else a child has it that was forked before they died
                members.join(member)
                on_failure.pop_all()
                return fd, members
    return None


def _find_unlinked(path: Path) -> Iterator[Path]:
    """Where processes that may be looked into have the file open that had the name *path*. Cost: 10 us an open file."""
    wanted = Path(f"{path} (deleted)")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone, or another user's
            for link in (process / "fd").iterdir():
                with suppress(FileNotFoundError):
                    if link.readlink() == wanted:
                        yield link


def reclaim_dead() -> None:
    """Remove the pools that dead processes of this user left in shared memory. Nothing else is touched."""
    for path in SHARED_MEMORY.glob(f"kvtier-{os.geteuid()}-*"):
        with ExitStack() as done:
            try:
                fd = os.open(path, _OPEN)
            except OSError:  # gone by now, or not ours after all
                continue
            done.callback(os.close, fd)
            if _what_is_wrong(fd) is not None:
                continue
            members = Members.of(fd, 0)
            done.callback(members.close)
            if unlink_if_dead(fd, path, members) is Found.REMOVED:
                _log.warning("removed %s, which a process that died had left", path)


def check_is_own(fd: int, path: str) -> None:
    """Raises ``PermissionError`` when the open file belongs to another user, who could read it and cut it short."""
    if (uid := os.fstat(fd).st_uid) != os.geteuid():
        raise PermissionError(errno.EPERM, f"the pool belongs to another user (uid {uid})", path)


class Found(enum.Enum):
    """What became of a named file when somebody looked whether it is dead."""

    ALIVE = "others live in it"
    REMOVED = "it was dead, and its name is gone"
    UNKNOWN = "it has no such name any more, or somebody else looks at it"


def unlink_if_dead(
    fd: int, path: Path, members: Members, *, then: Callable[[], None] | None = None, timeout_s: float = 0.0
) -> Found:
    """Remove the name *path* of the open file unless others live in it; *then* is called before these can leave.

    Waits up to *timeout_s* for somebody else who looks at it.
    """
    if not members.enter_gate(timeout_s):
        return Found.UNKNOWN
    try:
        if not is_at(fd, path):
            return Found.UNKNOWN
        if not members.anyone():
            path.unlink()
            return Found.REMOVED
        if then is not None:
            then()
        return Found.ALIVE
    finally:
        members.leave_gate()


def is_at(fd: int, path: Path) -> bool:
    """Whether *path* still names the open file."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _what_is_wrong(fd: int) -> str | None:
    """Why this can't be a pool that processes of this user made; ``None`` when it can."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    if status.st_uid != os.geteuid():
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o077:
        return f"others may use (mode {stat.S_IMODE(status.st_mode):o}), as no pool is made"
    if os.pread(fd, len(MAGIC), 0) != MAGIC:
        return "is no pool of kvtier's"
    return None


def _taken(path: Path, wrong: str) -> PermissionError:
    return PermissionError(
        errno.EPERM,
        f"the pool's name is taken by something that {wrong}: have it removed, or give the pool another name",
        str(path),
    )


def _make_named(
    path: Path, total_bytes: int, header: bytes, what: str, member: int, num_workers: int
) -> tuple[int, Members] | None:
    what = f"{what} named {path}"
    with ExitStack() as on_failure:
        fd = os.open(path.parent, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, _PRIVATE)
        on_failure.callback(os.close, fd)
        os.fchmod(fd, _PRIVATE)  # whatever the umask
        with _refused(what):
            os.pwrite(fd, header, 0)
        members = Members.of(fd, num_workers)
        on_failure.callback(members.close)
        members.join(member)  # before there is a name: whoever finds it finds it alive
        members.enter_gate(0.0)  # and waits here until it has all its pages
        if not _link(fd, path):
            return None
        on_failure.callback(path.unlink, missing_ok=True)
        _check_fits(total_bytes, what)
        with _refused(what):
            os.posix_fallocate(fd, 0, total_bytes)
        by_name = os.open(
            path, _OPEN
        )  # so that it can be told from what it is open as, once the name is gone
        os.close(fd)
        members.leave_gate()
        on_failure.pop_all()
        return by_name, members


def _link(fd: int, path: Path) -> bool:
    """Give the open file its name; False when something else has it."""
    own_fds = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(fd), path, src_dir_fd=own_fds)  # with a directory, Python follows the link to the file
    except FileExistsError:
        return False
    finally:
        os.close(own_fds)
    return True


def _check_fits(total_bytes: int, what: str) -> None:
    limit = find_memory_limit()
    if total_bytes > limit.bytes:
        raise MemoryError(
            f"{what} does not fit: {limit.source} leaves {format_size(limit.bytes)}. "
            "Set a smaller pool capacity or free memory."
        )


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Raise ``MemoryError`` when the kernel does not give the memory."""
    try:
        yield
    except OSError as error:
        raise MemoryError(f"the kernel refused {what}: {error}") from error
