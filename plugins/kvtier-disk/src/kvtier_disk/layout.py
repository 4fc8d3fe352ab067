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
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier_core import BlockInfo, OffloadKey
from kvtier_disk.files import StrangerError, has_writer, make_folder, open_to_read, write_new

_BLOCK_NAME = re.compile(r"((?:[0-9a-f]{2})+)\.kv")
_FAN_OUT_NAME = re.compile(r"[0-9a-f]{2}")
_WRITE_ATTEMPTS = 3


class FileLayout:
    """The blocks of one namespace in one directory. Stateless: safe from any thread and beside other processes."""

    def __init__(
        self, directory: Path, block_bytes: int, note: Callable[[str], None], *, read_only: bool = False
    ) -> None:
        """Blocks of *block_bytes* in *directory*; *note* is told what stood in a block's place. No I/O.

        With *read_only* every change raises ``OSError`` (``EROFS``), and what should go stays.
        """
        self._directory = directory
        self._read_only = read_only
        self._tmp = directory / "tmp"
        self._block_bytes = block_bytes
        self._note = note

    def make(self) -> None:
        """Make the namespace's directory where it is missing. Raises ``OSError``."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def prepare(self) -> None:
        """Remove leftovers and show that files can be written. Raises ``OSError``; blocks may be read all the same."""
        make_folder(self._tmp)
        self._remove_leftovers()
        probe = self._temporary()
        write_new(probe, memoryview(b""))
        probe.unlink()

    def describe(self, description: Mapping[str, Any]) -> None:
        """Put *description* beside the blocks, unless it is there. Raises ``OSError``."""
        path = self._directory / "namespace.json"
        text = json.dumps(description, indent=2, sort_keys=True, default=str).encode() + b"\n"
        if _read(path, len(text) + 1) != text:
            self._publish(path, memoryview(text))

    def has(self, key: OffloadKey) -> bool:
        """Whether a block of the right size is stored under *key*. Raises ``OSError`` on a fault."""
        try:
            return self._problem(self._path(key).lstat()) is None
        except (FileNotFoundError, NotADirectoryError):
            return False

    def put(self, key: OffloadKey, block: memoryview) -> None:
        """Store a block, replacing what has its name. Raises ``OSError``, and then no block has changed."""
        self._publish(self._path(key), block)

    def get(self, key: OffloadKey, into: memoryview) -> bool:
        """Fill *into*; false when there is no such block. Raises ``OSError`` when it can't be read.

        What has the block's name and is no whole block is removed, and absent. Part of *into* may be written then.
        """
        path = self._path(key)
        try:
            fd = open_to_read(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except StrangerError as stranger:
            self._drop(path, str(stranger))
            return False
        try:
            problem = self._problem(os.fstat(fd)) or _fill(fd, into)
        finally:
            os.close(fd)
        if problem is not None:
            self._drop(path, problem)
        return problem is None

    def remove(self, key: OffloadKey) -> None:
        """Remove a block if it is there. Raises ``OSError`` on a fault."""
        with contextlib.suppress(NotADirectoryError):  # its folder is none, so there is no block
            self._clear(self._path(key))

    def scan(self) -> Iterator[BlockInfo]:
        """Every block; what has a name of ours and is neither folder nor block is removed. Raises ``OSError``."""
        if self._read_only and not self._directory.is_dir():
            return  # nobody has stored anything yet
        with os.scandir(self._directory) as entries:
            found = [entry for entry in entries if _FAN_OUT_NAME.fullmatch(entry.name)]
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield from self._scan_folder(entry)
            else:
                self._drop(Path(entry.path), "is no directory")

    def remove_all(self) -> None:
        """Remove the namespace's directory with all that is in it. Raises ``OSError``."""
        self._check_writable()
        shutil.rmtree(self._directory)

    def _scan_folder(self, folder: os.DirEntry[str]) -> Iterator[BlockInfo]:
        with os.scandir(folder.path) as entries:
            for entry in entries:
                match = _BLOCK_NAME.fullmatch(entry.name)
                if match is None or not entry.name.startswith(folder.name):
                    continue  # not a name under which a block would be looked for
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # another process evicted it just now
                problem = self._problem(status)
                if problem is None:
                    key = OffloadKey(bytes.fromhex(match[1]))
                    yield BlockInfo(key=key, bytes=status.st_size, time=status.st_mtime)
                else:
                    self._drop(Path(entry.path), problem)

    def _path(self, key: OffloadKey) -> Path:
        name = key.hex()
        return self._directory / name[:2] / f"{name}.kv"

    def _temporary(self) -> Path:
        return self._tmp / f"{os.getpid()}-{secrets.token_hex(8)}"

    def _problem(self, status: os.stat_result) -> str | None:
        """Why this can't be a whole block."""
        if not stat.S_ISREG(status.st_mode):
            return "is no regular file"
        if status.st_size != self._block_bytes:
            return f"has {status.st_size} bytes and not {self._block_bytes}"
        return None

    def _publish(self, path: Path, content: memoryview) -> None:
        """Write *content* under a name of its own, then rename it to *path*."""
        self._check_writable()
        for attempt in range(_WRITE_ATTEMPTS):
            temporary = self._temporary()
            try:
                write_new(temporary, content)
                self._rename(temporary, path)
            except (FileNotFoundError, NotADirectoryError):
                # The folder of temporary files is gone. Or, where locks don't work, a process that opened the
                # namespace took our file for a leftover.
                if attempt + 1 == _WRITE_ATTEMPTS:
                    raise
                make_folder(self._tmp)
            else:
                return
            finally:
                with contextlib.suppress(OSError):  # a leftover then; why the write failed matters more
                    temporary.unlink()

    def _rename(self, temporary: Path, path: Path) -> None:
        try:
            temporary.rename(path)
        except (FileNotFoundError, NotADirectoryError):
            # The first block of this folder: made now, because making all 256 at the start takes far longer.
            make_folder(path.parent)
        except IsADirectoryError:
            self._drop(path, "is a directory")
        else:
            return
        temporary.rename(path)

    def _remove_leftovers(self) -> None:
        with os.scandir(self._tmp) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    self._note(f"{entry.path} is a directory and no work of kvtier's: ignored")
                    continue
                with contextlib.suppress(OSError):  # one that can't be removed is never read either
                    if not has_writer(Path(entry.path)):
                        Path(entry.path).unlink()

    def _drop(self, path: Path, problem: str) -> None:
        """Take away what has a name of ours and is not what it should be, as far as that can be done, and say so."""
        try:
            end = self._clear(path)
        except OSError as error:
            end = f"it stays, because it can't be removed ({error.strerror})"
        self._note(f"{path} {problem}: {end}")

    def _clear(self, path: Path) -> str:
        """Remove *path*. A directory is no work of ours and may hold somebody's files: it only leaves the place."""
        self._check_writable()
        try:
            path.unlink(missing_ok=True)
        except IsADirectoryError:
            aside = self._tmp / f"{path.name}-{secrets.token_hex(4)}"
            path.rename(aside)
            return f"moved to {aside}"
        return "removed"

    def _check_writable(self) -> None:
        if self._read_only:
            raise OSError(errno.EROFS, "the tier is configured read_only", str(self._directory))


def _fill(fd: int, into: memoryview) -> str | None:
    """Read ``len(into)`` bytes. Returns what is wrong when there are fewer."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], done)
        if count == 0:
            return f"ends after {done} bytes of {len(into)}"
        done += count
    return None


def _read(path: Path, limit: int) -> bytes | None:
    """The first *limit* bytes of a regular file, ``None`` where there is none. Raises ``OSError``."""
    try:
        fd = open_to_read(path)
    except (FileNotFoundError, StrangerError):
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read(limit)
