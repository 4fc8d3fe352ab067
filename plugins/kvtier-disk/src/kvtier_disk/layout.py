"""How blocks lie on the disk: one file a block, visible only when it is whole.

::

    <directory>/namespace.json       what the namespace stands for, for people
    <directory>/<2 hex>/<key hex>.kv  a block; the whole key, group index included, is its name
    <directory>/tmp/<pid>-<random>    a block being written, locked by its writer

Decides names, atomicity, what is a leftover, and what becomes of whatever has a name of ours and is no block (it is
never read, and goes). Never decides what to keep: capacity and eviction are the core's.

A block is written to a temporary file that nobody else has (``O_EXCL``) and then renamed to its name. So a reader
finds the old file, the new file or none, and a killed process leaves at most temporary files, which the next
``prepare`` removes unless their writer lives. Nothing is synced: after a power loss a named file may hold torn bytes,
which the proof in every block turns into a miss.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvtier_core.tier import BlockInfo, OffloadKey
from kvtier_disk.description import NAME, describe
from kvtier_disk.files import has_writer, write_new
from kvtier_disk.folder import Folder, ForeignError, Handle, StrangerError
from kvtier_disk.others import BLOCK_NAME, FAN_OUT_NAME

_WRITE_ATTEMPTS = 3


class FileLayout:
    """The blocks of one namespace in one directory. Stateless: safe from any thread and beside other processes."""

    def __init__(
        self,
        root: Folder,
        namespace: str,
        block_bytes: int,
        note: Callable[[str], None],
        *,
        description: Mapping[str, Any] | None = None,
        read_only: bool = False,
    ) -> None:
        """Blocks of *block_bytes* in the directory *namespace*; *note* is told what stood in a block's place. No I/O.

        *description* is put beside the blocks, for people.
        With *read_only* every change raises ``OSError`` (``EROFS``), and what should go stays.
        """
        self._root = root
        self._folder = root.sub(namespace)
        self._tmp = self._folder.sub("tmp")
        self._read_only = read_only
        self._block_bytes = block_bytes
        self._note = note
        self._description = description or {}

    def make(self) -> None:
        """Make the namespace's directory where it is missing. Raises ``OSError``."""
        self._folder.make()

    def folders(self) -> list[Folder]:
        """The namespace's directory and those of ours in it. Raises ``OSError``."""
        try:
            with self._folder.opened() as handle:
                inner = [entry.name for entry in handle.entries() if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return [self._folder]
        ours = [name for name in inner if name == self._tmp.path.name or FAN_OUT_NAME.fullmatch(name)]
        return [self._folder, *map(self._folder.sub, ours)]

    def prepare(self) -> None:
        """Remove leftovers and show that files can be written. Raises ``OSError``; blocks may be read all the same."""
        self._make(self._tmp)
        with self._tmp.opened() as tmp:
            self._remove_leftovers(tmp)
            probe = _temporary()
            write_new(tmp, probe, memoryview(b""))
            tmp.unlink(probe)

    def describe(self) -> None:
        """Put the description beside the blocks, unless it is there. Raises ``OSError``."""
        with self._folder.opened() as handle, self._tmp.opened() as tmp:
            try:
                describe(handle, self._description, tmp)
            except IsADirectoryError:
                self._drop(self._folder, NAME, "is a directory")
                describe(handle, self._description, tmp)

    def has(self, key: OffloadKey) -> bool:
        """Whether a block of the right size is stored under *key*. Raises ``OSError`` on a fault."""
        try:
            with self._folder_of(key).opened() as handle:
                return self._problem(handle, handle.status(_name(key))) is None
        except (FileNotFoundError, NotADirectoryError):
            return False

    def put(self, key: OffloadKey, block: memoryview) -> None:
        """Store a block, replacing what has its name. Raises ``OSError``, and then no block has changed."""
        self._check_writable()
        for attempt in range(_WRITE_ATTEMPTS):
            try:
                with self._tmp.opened() as tmp:
                    self._publish(key, block, tmp)
            except (FileNotFoundError, NotADirectoryError):
                # The folder of temporary files is gone, or the namespace's with it. Or, where locks don't work, a
                # process that opened the namespace took our file for a leftover.
                if attempt + 1 == _WRITE_ATTEMPTS:
                    raise
                self._make(self._tmp)
                with contextlib.suppress(OSError):  # only people read it
                    self.describe()
            else:
                return

    def get(self, key: OffloadKey, into: memoryview) -> bool:
        """Fill *into*; false when there is no such block. Raises ``OSError`` when it can't be read.

        What has the block's name and is no regular file of ours is removed, and absent. A file that is no whole block
        is removed too and gives zeros, which prove nothing: the core counts it as damaged.
        """
        folder, is_damaged = self._folder_of(key), False
        try:
            with folder.opened() as handle:
                try:
                    fd = _open(handle, _name(key))
                except (StrangerError, ForeignError):
                    problem = self._problem(handle, handle.status(_name(key)))
                else:
                    try:
                        problem = self._problem(handle, os.fstat(fd)) or _fill(fd, into)
                        is_damaged = problem is not None
                    finally:
                        os.close(fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if problem is not None:
            self._drop(folder, _name(key), problem)
        if is_damaged:
            into[:] = bytes(len(into))
        return is_damaged or problem is None

    def remove(self, key: OffloadKey) -> None:
        """Remove a block if it is there. Raises ``OSError`` on a fault."""
        with contextlib.suppress(
            FileNotFoundError, NotADirectoryError
        ):  # without its folder there is no block
            self._clear(self._folder_of(key), _name(key))

    def mark_used(self, key: OffloadKey, time: float) -> None:
        """Note in the block's file when it was used last, where it is there. Raises ``OSError`` on a fault."""
        self._check_writable()
        folder = self._folder_of(key)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder.opened() as handle:
            stored = handle.status(_name(key)).st_mtime  # what its age is told by
            os.utime(_name(key), (time, stored), dir_fd=handle.fd, follow_symlinks=False)

    def scan(self) -> Iterator[BlockInfo]:
        """Every block; what has a name of ours and is neither folder nor block is removed. Raises ``OSError``."""
        try:
            with self._folder.opened() as handle:
                names = [entry.name for entry in handle.entries() if FAN_OUT_NAME.fullmatch(entry.name)]
        except FileNotFoundError:
            if self._read_only:
                return  # nobody has stored anything yet
            raise
        for name in names:
            folder = self._folder.sub(name)
            try:
                with folder.opened() as handle:
                    yield from self._scan_folder(folder, handle)
            except FileNotFoundError:
                continue
            except NotADirectoryError:
                self._drop(self._folder, name, "is no directory")

    def remove_all(self) -> None:
        """Remove the namespace's directory with all that is in it. Raises ``OSError``."""
        self._check_writable()
        with self._root.opened() as root:
            shutil.rmtree(self._folder.path.name, dir_fd=root.fd)

    def _scan_folder(self, folder: Folder, handle: Handle) -> Iterator[BlockInfo]:
        for entry in handle.entries():
            match = BLOCK_NAME.fullmatch(entry.name)
            if match is None or not entry.name.startswith(folder.path.name):
                continue  # not a name under which a block would be looked for
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # another process evicted it just now
            problem = self._problem(handle, status)
            if problem is None:
                key = OffloadKey(bytes.fromhex(match[1]))
                yield BlockInfo(key=key, bytes=status.st_size, time=status.st_mtime, used=status.st_atime)
            else:
                self._drop(folder, entry.name, problem)

    def _folder_of(self, key: OffloadKey) -> Folder:
        return self._folder.sub(key.hex()[:2])

    def _problem(self, handle: Handle, status: os.stat_result) -> str | None:
        """Why this can't be a whole block."""
        problem = handle.problem(status)
        if problem is None and status.st_size != self._block_bytes:
            return f"has {status.st_size} bytes and not {self._block_bytes}"
        return problem

    def _publish(self, key: OffloadKey, block: memoryview, tmp: Handle) -> None:
        """Write *block* under a name of its own, then rename it."""
        temporary = _temporary()
        try:
            write_new(tmp, temporary, block)
            self._rename(tmp, temporary, self._folder_of(key), _name(key))
        finally:
            with contextlib.suppress(OSError):  # a leftover then; why the write failed matters more
                tmp.unlink(temporary)

    def _rename(self, tmp: Handle, temporary: str, folder: Folder, name: str) -> None:
        try:
            with folder.opened() as handle:
                os.rename(temporary, name, src_dir_fd=tmp.fd, dst_dir_fd=handle.fd)
        except (FileNotFoundError, NotADirectoryError):
            # The first block of this folder: made now, because making all 256 at the start takes far longer.
            self._make(folder)
        except IsADirectoryError:
            self._drop(folder, name, "is a directory")
        else:
            return
        with folder.opened() as handle:
            os.rename(temporary, name, src_dir_fd=tmp.fd, dst_dir_fd=handle.fd)

    def _make(self, folder: Folder) -> None:
        """Make a folder of the namespace's, and the namespace's own. What else has its name is removed."""
        self._folder.make()
        folder.make()
        if not folder.is_there():
            with self._folder.opened() as handle:
                handle.unlink(folder.path.name)
            folder.make()

    def _remove_leftovers(self, tmp: Handle) -> None:
        for entry in tmp.entries():
            if entry.is_dir(follow_symlinks=False):
                self._note(f"{tmp.path / entry.name} is a directory and no work of kvtier's: ignored")
                continue
            with contextlib.suppress(OSError):  # one that can't be removed is never read either
                if not has_writer(tmp, entry.name):
                    tmp.unlink(entry.name)

    def _drop(self, folder: Folder, name: str, problem: str) -> None:
        """Take away what has a name of ours and is not what it should be, as far as that can be done, and say so."""
        try:
            end = self._clear(folder, name)
        except OSError as error:
            end = f"it stays, because it can't be removed ({error.strerror})"
        self._note(f"{folder.path / name} {problem}: {end}")

    def _clear(self, folder: Folder, name: str) -> str:
        """Remove *name*. A directory is no work of ours and may hold somebody's files: it only leaves the place."""
        self._check_writable()
        with folder.opened() as handle:
            try:
                handle.unlink(name)
            except IsADirectoryError:
                aside = f"{name}-{secrets.token_hex(4)}"
                with self._tmp.opened() as tmp:
                    os.rename(name, aside, src_dir_fd=handle.fd, dst_dir_fd=tmp.fd)
                return f"moved to {self._tmp.path / aside}"
        return "removed"

    def _check_writable(self) -> None:
        if self._read_only:
            raise OSError(errno.EROFS, "the tier is configured read_only", str(self._folder.path))


def _name(key: OffloadKey) -> str:
    return f"{key.hex()}.kv"


def _temporary() -> str:
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def _open(handle: Handle, name: str) -> int:
    """A descriptor to read by, as ``Handle.open_file``; reading changes no time of access: that tells of uses."""
    try:
        return handle.open_file(name, os.O_RDONLY | os.O_NOATIME)
    except PermissionError:  # another user's, in a root that others may write to
        return handle.open_file(name)


def _fill(fd: int, into: memoryview) -> str | None:
    """Read ``len(into)`` bytes. Returns what is wrong when there are fewer."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], done)
        if count == 0:
            return f"ends after {done} bytes of {len(into)}"
        done += count
    return None
