"""What kind of place a root is: may we write, may others, which layout and file system, and does it do ``O_DIRECT``.

Decides what is refused. File systems are told by the kernel's table of mounts: those that other machines may have
mounted too are refused for extents, because the index relies on locks and shared memory of one machine.
"""

import errno
import mmap
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from kvtier_core import KvtierError

_NETWORK = frozenset(
    {"9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs", "lustre"}
    | {"ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "virtiofs", "vboxsf"}
)
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PROBE_BYTES = 4096


class RootRefusedError(KvtierError):
    """The root can't be used, in words that end with what to change."""


def is_namespace(name: str) -> bool:
    """Whether a namespace can have this name, which is its directory's."""
    return _NAMESPACE.fullmatch(name) is not None


def check_namespace(name: str) -> None:
    """Raises ``RootRefusedError`` for a name that is no plain directory name: nothing may leave the root."""
    if not is_namespace(name):
        raise RootRefusedError(
            f"{name!r} can't be the name of a directory: use letters, digits, '.', '_' and '-'"
        )


def open_root(root: Path, *, layout: str, shared_writes: bool, read_only: bool) -> None:
    """Make *root* if it is missing and may be made. Raises ``OSError``.

    Raises ``RootRefusedError`` when everybody may write to it, and when it holds blocks of another *layout*.
    """
    if read_only and not root.exists():
        raise RootRefusedError(
            f"root {str(root)!r} is not there, and the tier is configured read_only: name a root that others fill"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root)) from error
    if root.stat().st_mode & stat.S_IWOTH and not shared_writes:
        raise RootRefusedError(
            f"everybody may write to root {str(root)!r}, and so change what models read: take that right away"
            " (chmod o-w), or set allow_writable_by_others = true"
        )
    for other in sorted(_layouts_in(root) - {layout}):
        raise RootRefusedError(
            f'root {str(root)!r} holds blocks of layout = "{other}", which would neither be served nor counted: set'
            f' another root, or layout = "{other}", or remove them'
        )


def _layouts_in(root: Path) -> set[str]:
    """The layouts of the blocks below *root*."""
    found = {"extents"} if (root / ".kvtier").is_dir() else set()
    for directory in root.iterdir():
        # What can't be looked into is no namespace, and no error.
        if os.path.isdir(directory / "tmp") and os.path.isfile(directory / "namespace.json"):  # noqa: PTH112, PTH113
            found.add("files")
    return found


def refuse_link(directory: Path) -> None:
    """Raises ``RootRefusedError`` when a link or a file is where *directory* would be, and ``OSError``."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise RootRefusedError(
            f"{str(directory)!r} is a link or a file, and nothing may lead out of the root: put a directory, or"
            " nothing, in its place"
        )


def check_local(root: Path) -> None:
    """Raises ``RootRefusedError`` when *root* is on a network file system."""
    kind = file_system_of(root)
    if kind in _NETWORK or (kind is not None and kind.startswith("fuse")):
        raise RootRefusedError(
            f"root {str(root)!r} is on a {kind} file system, whose locks and shared memory can't be relied on: set"
            ' root to a local disk, or layout = "files"'
        )


def file_system_of(path: Path) -> str | None:
    """The type of the file system that *path* is on, as the kernel names it; ``None`` when that can't be told."""
    try:
        device = path.stat().st_dev
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    by_device, by_path = None, None
    longest = -1
    resolved = str(path.resolve())
    for line in lines:
        before, _, after = line.partition(" - ")
        _, _, number, _, mount_point, *_ = before.split(" ")
        kind = after.split(" ")[0]
        if number == f"{os.major(device)}:{os.minor(device)}":
            by_device = kind
        point = mount_point.encode().decode("unicode_escape")
        if (resolved + "/").startswith(point.rstrip("/") + "/") and len(point) >= longest:
            by_path, longest = kind, len(point)
    return by_device or by_path


def why_not_direct(directory: Path, written: Path | None) -> str | None:
    """Try ``O_DIRECT`` on a file that has been written; ``None`` when it works, else why not. Raises no error.

    Reads the first page of *written*, or writes to a new file in *directory* when that is ``None``.
    """
    if written is not None:
        return _why_not_read(written)
    path = directory / f"probe-{secrets.token_hex(6)}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, bytes(_PROBE_BYTES), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        return _why_not_read(path)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with suppress(OSError):
            path.unlink()


def _why_not_read(path: Path) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            with mmap.mmap(-1, _PROBE_BYTES) as memory:
                os.preadv(fd, [memory], 0)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    return None
