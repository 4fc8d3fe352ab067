"""Directories and files that nobody but their owner can change, unless a setting lets others do so (C38).

Decides whose a directory or a file may be, which mode a new one gets, and that no link below a root is followed. For
example a namespace's file is reached by three handles: the root's, the namespace's in it, the file's in that; each
directory is looked at when its handle is opened, so that one that was exchanged is noticed whenever that happened.

Never decides what becomes of a stranger: that is up to who meets it.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # the last: a pipe would wait for its other end
_PRIVATE_DIRECTORY, _PRIVATE_FILE = 0o700, 0o600
_LIKE_DIRECTORY, _LIKE_FILE = 0o2777, 0o666
"""What a new directory or file takes of the mode of the directory it is made in, where others may write to that."""
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR})
"""How links, sockets, devices without a driver and directories refuse to be opened."""


class StrangerError(OSError):
    """What stands under a name of ours is no regular file."""


class ForeignError(PermissionError):
    """Another user or a group could change what stands under a name of ours."""


class Folder:
    """A directory of a tier's: the root, or one below it. Stateless: safe from any thread, beside other processes."""

    def __init__(self, path: Path, *, shared: bool = False, within: "Folder | None" = None) -> None:
        """The directory *path*, which lies in *within* unless it is the root. No I/O.

        With *shared* others may own it or write to it, and what is made in it has its mode and its group. Without, what
        is made in it is this user's alone (0700, and 0600 for files), whatever the umask.
        """
        self.path = path
        self.shared = shared
        self._within = within

    def sub(self, name: str) -> "Folder":
        """The directory *name* in this one."""
        return Folder(self.path / name, shared=self.shared, within=self)

    @contextmanager
    def opened(self) -> Iterator["Handle"]:
        """A handle of the directory as it is now. Cost: an ``open`` and a ``stat`` for each directory from the root on.

        Raises ``ForeignError`` when others could change what is in it, ``FileNotFoundError``, and
        ``NotADirectoryError`` when something else has its name, such as a link (the root may be one).
        """
        handle = self._open()
        try:
            yield handle
        finally:
            os.close(handle.fd)

    def _open(self) -> "Handle":
        if self._within is None:
            fd = os.open(self.path, _DIRECTORY)
        else:
            with self._within.opened() as parent:
                fd = parent.open_directory(self.path.name)
        problem = None if self.shared else foreign_problem(os.fstat(fd))
        if problem is not None:
            os.close(fd)
            raise ForeignError(
                errno.EPERM,
                f"{problem}, and so may change what models read: use a directory of its own; or give this one to the"
                " user that runs this and take the right to write from all others (chmod -R go-w); or set"
                " allow_writable_by_others = true (kvtier disk: --allow-writable-by-others)",
                str(self.path),
            )
        return Handle(fd, self.path, shared=self.shared)

    def make(self) -> None:
        """Make the directory where it is missing; the root with all that leads to it. Raises ``OSError``."""
        if self._within is not None:
            with self._within.opened() as parent:
                parent.make_directory(self.path.name)
        elif not self.path.is_dir():
            for missing in [path for path in (*reversed(self.path.parents), self.path) if not path.exists()]:
                with suppress(FileExistsError):
                    missing.mkdir(mode=_PRIVATE_DIRECTORY)
                    missing.chmod(_PRIVATE_DIRECTORY)
            if not self.path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))

    def is_there(self) -> bool:
        """Whether there is such a directory, and no link to one. Raises ``OSError`` when that can't be told."""
        try:
            with self.opened():
                return True
        except (FileNotFoundError, NotADirectoryError):
            return False


class Handle:
    """An open directory. No link among its entries is followed. Every method raises ``OSError``."""

    def __init__(self, fd: int, path: Path, *, shared: bool) -> None:
        """*path* is for messages."""
        self.fd = fd
        self.path = path
        self._shared = shared

    def entries(self) -> Iterator[os.DirEntry[str]]:
        """What is in the directory. Look at an entry's status with ``follow_symlinks=False``."""
        with os.scandir(self.fd) as found:
            yield from found

    def status(self, name: str) -> os.stat_result:
        """The status of an entry, whatever it is."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def problem_of(self, name: str) -> str | None:
        """Why what has this name is no file of ours; ``None`` when it is one, or nothing is there."""
        try:
            return self.problem(self.status(name))
        except FileNotFoundError:
            return None

    def problem(self, status: os.stat_result) -> str | None:
        """Why this is no file of ours."""
        if not stat.S_ISREG(status.st_mode):
            return "is no regular file"
        return None if self._shared else foreign_problem(status)

    def open_file(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of the regular file *name*. Raises ``StrangerError`` for anything else, ``ForeignError``."""
        path = str(self.path / name)
        try:
            fd = os.open(name, flags | _FILE, dir_fd=self.fd)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise StrangerError(errno.EINVAL, f"{name} is no regular file", path) from error
            raise OSError(error.errno, error.strerror, path) from None
        status = os.fstat(fd)
        problem = self.problem(status)
        if problem is None:
            return fd
        os.close(fd)
        if stat.S_ISREG(status.st_mode):
            raise ForeignError(errno.EPERM, f"{name}: {problem}", path)
        raise StrangerError(errno.EINVAL, f"{name} {problem}", path)

    def make_file(self, name: str, flags: int = os.O_RDWR) -> int:
        """A descriptor of a new file. Raises ``FileExistsError`` where anything has its name."""
        try:
            fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | _FILE, _PRIVATE_FILE, dir_fd=self.fd)
        except OSError as error:
            raise self._not_made(error, name) from None
        try:
            self._settle(fd, f"/proc/self/fd/{fd}", _PRIVATE_FILE, _LIKE_FILE)
        except BaseException:
            os.close(fd)
            self.unlink(name)
            raise
        return fd

    def read(self, name: str, limit: int) -> bytes | None:
        """What is in the file; ``None`` where no file of ours has the name, or it is longer than *limit* bytes."""
        try:
            fd = self.open_file(name)
        except (FileNotFoundError, StrangerError, ForeignError):
            return None
        with os.fdopen(fd, "rb") as file:
            content = file.read(limit + 1)
        return content if len(content) <= limit else None

    def publish(self, name: str, content: bytes, drafts: "Handle") -> None:
        """Put *content* under *name*, whole, in the place of what has it. Its draft, ``*.draft``, is in *drafts*."""
        draft = f"{secrets.token_hex(8)}.draft"
        fd = drafts.make_file(draft, os.O_WRONLY)
        try:
            try:
                write_all(fd, memoryview(content))
            finally:
                os.close(fd)
            os.rename(draft, name, src_dir_fd=drafts.fd, dst_dir_fd=self.fd)
        except BaseException:
            drafts.unlink(draft)
            raise

    def unlink(self, name: str) -> None:
        """Remove a file if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def open_directory(self, name: str) -> int:
        """A descriptor of the directory *name*. Raises ``NotADirectoryError``, for a link too."""
        try:
            return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.fd)
        except OSError as error:
            path = self.path / name
            if error.errno == errno.ENOTDIR:
                raise OSError(
                    errno.ENOTDIR, "a link or a file in the place of a directory", str(path)
                ) from None
            raise OSError(error.errno, error.strerror, str(path)) from None

    def make_directory(self, name: str) -> None:
        """Make the directory *name* where nothing has its name."""
        try:
            os.mkdir(name, _PRIVATE_DIRECTORY, dir_fd=self.fd)
        except FileExistsError:
            return
        except OSError as error:
            raise self._not_made(error, name) from None
        # By a handle that needs no right to the directory: the umask may have taken this user's.
        fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            self._settle(fd, f"/proc/self/fd/{fd}", _PRIVATE_DIRECTORY, _LIKE_DIRECTORY)
        finally:
            os.close(fd)

    def _not_made(self, error: OSError, name: str) -> OSError:
        text = error.strerror
        if error.errno == errno.ENOSPC:
            found = os.fstatvfs(self.fd)
            if found.f_files and not found.f_favail:
                text = (
                    f"the file system has no inode left ({found.f_files} files are there already), whatever room it has"
                    " for their bytes: remove files, or make it with more inodes"
                )
        return OSError(error.errno, text, str(self.path / name))

    def _settle(self, fd: int, itself: str, private: int, alike: int) -> None:
        """Give something new the mode it is to have, and the group where others are to use it."""
        status = os.fstat(fd)
        mode = private
        if self._shared:
            ours = os.fstat(self.fd)
            mode = ours.st_mode & alike | private
            if status.st_gid != ours.st_gid:
                with suppress(PermissionError):  # who is not of that group can give it nothing
                    os.chown(itself, -1, ours.st_gid)
        if stat.S_IMODE(status.st_mode) != mode:
            os.chmod(itself, mode)  # noqa: PTH101 - the very file that is open, whatever has its name now


def write_all(fd: int, content: memoryview) -> None:
    """Write all of *content*. Raises ``OSError``; a part may be written then."""
    done = 0
    while done < len(content):
        done += os.write(fd, content[done:])


def foreign_problem(status: os.stat_result) -> str | None:
    """Why others could change this; ``None`` when only this user and root can."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & stat.S_IWOTH:
        return "everybody may write to it"
    if status.st_mode & stat.S_IWGRP:
        return f"its group (gid {status.st_gid}) may write to it"
    return None
