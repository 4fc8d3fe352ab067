"""What kind of place a root is: may others change it, which layout and file system, and does it do ``O_DIRECT``.

Decides what is refused. File systems are told by the kernel's table of mounts: those that other machines may have
mounted too are refused for extents, because the index relies on locks and shared memory of one machine.
"""

import errno
import mmap
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from kvtier_core import KvtierError
from kvtier_disk.folder import Folder, ForeignError, Handle, write_all

_NETWORK = frozenset(
    {"9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs", "lustre"}
    | {"ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "virtiofs", "vboxsf"}
)
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PROBE_BYTES = 4096
_NOT_SUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""How storage answers where nothing may be written, until somebody changes that."""

ONLY_SERVED = "Its blocks are served, and nothing is stored or deleted"


class RootRefusedError(KvtierError):
    """The root can't be used, in words that end with what to change."""


def served_only(path: Path, error: OSError) -> str:
    """What to say of a root in which nothing may be written."""
    return f"can't write below {path}: {error.strerror or error}. {ONLY_SERVED} until it can be written"


def is_namespace(name: str) -> bool:
    """Whether a namespace can have this name, which is its directory's."""
    return _NAMESPACE.fullmatch(name) is not None


def check_namespace(name: str) -> None:
    """Raises ``RootRefusedError`` for a name that is no plain directory name: nothing may leave the root."""
    if not is_namespace(name):
        raise RootRefusedError(
            f"{name!r} can't be the name of a directory: use letters, digits, '.', '_' and '-'"
        )


def open_root(root: Folder, *, layout: str, read_only: bool) -> None:
    """Make *root* if it is missing and may be made. Raises ``OSError``.

    Raises ``RootRefusedError`` when others could change it, and when it holds blocks of another *layout*.
    """
    if read_only and not root.path.exists():
        raise RootRefusedError(
            f"root {str(root.path)!r} is not there, and the tier is configured read_only: name a root that others fill"
        )
    root.make()
    refuse_foreign(root)
    for other in sorted(_layouts_in(root.path) - {layout}):
        raise RootRefusedError(
            f'root {str(root.path)!r} holds blocks of layout = "{other}", which would neither be served nor counted:'
            f' set another root, or layout = "{other}", or remove them'
        )


def _layouts_in(root: Path) -> set[str]:
    """The layouts of the blocks below *root*."""
    found = {"extents"} if (root / ".kvtier").is_dir() else set()
    for directory in root.iterdir():
        # What can't be looked into is no namespace, and no error.
        if os.path.isdir(directory / "tmp") and os.path.isfile(directory / "namespace.json"):  # noqa: PTH112, PTH113
            found.add("files")
    return found


def refuse_foreign(*folders: Folder) -> None:
    """Raises ``RootRefusedError`` when a link or a file is where a folder would be, or others could change it.

    Raises ``OSError`` when that can't be told. A folder that is missing is none of these.
    """
    for folder in folders:
        try:
            with folder.opened():
                pass
        except FileNotFoundError:
            continue
        except ForeignError as error:
            raise RootRefusedError(f"{str(folder.path)!r}: {error.strerror}") from error
        except NotADirectoryError as error:
            raise RootRefusedError(
                f"{str(folder.path)!r} is a link or a file, and nothing may lead out of the root: put a directory, or"
                " nothing, in its place"
            ) from error


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


def check_syncs(folder: Folder) -> None:
    """Raises ``RootRefusedError`` when files in *folder* can't be synced, and ``OSError`` when none can be made."""
    name = f"probe-{secrets.token_hex(6)}"
    with folder.opened() as handle:
        try:
            fd = handle.make_file(name)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder.path)) from None  # the probe's says nothing
        try:
            os.fsync(fd)
            os.fdatasync(fd)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            raise RootRefusedError(
                f"the file system of {str(folder.path)!r} syncs no files ({error.strerror}), and a block that was told"
                " to be stored would not survive a power loss: set root to another file system, or layout ="
                ' "files", which syncs nothing'
            ) from error
        finally:
            os.close(fd)
            handle.unlink(name)


def probe_writing(folder: Folder, size: int) -> None:
    """Write a file of *size* bytes in *folder*, if that is there, and remove it. Raises ``OSError``."""
    name = f"probe-{secrets.token_hex(6)}"
    with suppress(FileNotFoundError), folder.opened() as handle:
        fd = handle.make_file(name, os.O_WRONLY)
        try:
            write_all(fd, memoryview(bytes(size)))
        finally:
            os.close(fd)
            handle.unlink(name)


def why_not_direct(folder: Folder, written: str | None) -> str | None:
    """Try ``O_DIRECT`` on a file in *folder*; ``None`` when it works, else why not. Raises no error.

    Reads the first page of *written*. When that is ``None``, it reads one of a new file that nothing was written to:
    a full disk has room for that.
    """
    try:
        with folder.opened() as handle:
            if written is not None:
                return _why_not_read(handle, written)
            name = f"probe-{secrets.token_hex(6)}"
            fd = handle.make_file(name)
            try:
                os.ftruncate(fd, _PROBE_BYTES)
                return _why_not_read(handle, name)
            finally:
                os.close(fd)
                handle.unlink(name)
    except OSError as error:
        return error.strerror or str(error)


def _why_not_read(handle: Handle, name: str) -> str | None:
    try:
        fd = handle.open_file(name, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, _PROBE_BYTES) as memory:
                os.preadv(fd, [memory], 0)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    return None
