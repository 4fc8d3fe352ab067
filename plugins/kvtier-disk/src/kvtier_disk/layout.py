"""How blocks lie on the disk: one file a block, visible only when it is whole.

::

    <directory>/namespace.json       what the namespace stands for, for people
    <directory>/<2 hex>/<key hex>.kv  a block; the whole key, group index included, is its name
    <directory>/tmp/<pid>-<random>    a block being written, locked by its writer

Decides names, atomicity and what is a leftover. Never decides what to keep: capacity and eviction are the core's.

A block is written to a temporary file that nobody else has (``O_EXCL``) and then renamed to its name. So a reader
finds the old file, the new file or none, and a killed process leaves at most temporary files, which the next ``open``
removes unless their writer lives. Nothing is synced: after a power loss a named file may hold torn bytes, which the
proof in every block turns into a miss.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier_core import BlockInfo, OffloadKey

_BLOCK_NAME = re.compile(r"((?:[0-9a-f]{2})+)\.kv")
_FAN_OUT_NAME = re.compile(r"[0-9a-f]{2}")
_WRITE_ATTEMPTS = 3
_STALE_AFTER_S = 600.0  # where the file system has no locks, a temporary file this old has no writer any more


class FileLayout:
    """The blocks of one namespace in one directory. Stateless: safe from any thread and beside other processes."""

    def __init__(self, directory: Path, block_bytes: int) -> None:
        """Blocks of *block_bytes* in *directory*. No I/O."""
        self._directory = directory
        self._tmp = directory / "tmp"
        self._block_bytes = block_bytes

    def open(self, description: Mapping[str, Any]) -> None:
        """Make the directories, show that they can be written, remove leftovers. Raises ``OSError``."""
        self._tmp.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        text = json.dumps(description, indent=2, sort_keys=True, default=str).encode() + b"\n"
        self._publish(self._directory / "namespace.json", memoryview(text))

    def has(self, key: OffloadKey) -> bool:
        """Whether a block of the right size is stored under *key*. Raises ``OSError`` on a fault."""
        try:
            return self._path(key).stat().st_size == self._block_bytes
        except FileNotFoundError:
            return False

    def put(self, key: OffloadKey, block: memoryview) -> None:
        """Store a block, replacing one of that name. Raises ``OSError``, and then nothing has changed."""
        self._publish(self._path(key), block)

    def get(self, key: OffloadKey, into: memoryview) -> bool:
        """Fill *into*; false when there is no such block. Raises ``OSError`` when it is damaged or can't be read."""
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            size = os.fstat(fd).st_size
            if size != len(into):
                raise OSError(f"{path} is damaged: it has {size} bytes and not {len(into)}")
            done = 0
            while done < size:
                count = os.preadv(fd, [into[done:]], done)
                if count == 0:
                    raise OSError(f"{path} is damaged: it ends after {done} bytes of {size}")
                done += count
        finally:
            os.close(fd)
        return True

    def remove(self, key: OffloadKey) -> None:
        """Remove a block if it is there. Raises ``OSError`` on a fault."""
        self._path(key).unlink(missing_ok=True)

    def scan(self) -> Iterator[BlockInfo]:
        """Every block; a file that has a block's name and not its size is removed. Raises ``OSError``."""
        with os.scandir(self._directory) as fan_out:
            folders = [entry.path for entry in fan_out if _FAN_OUT_NAME.fullmatch(entry.name)]
        for folder in folders:
            with os.scandir(folder) as entries:
                for entry in entries:
                    match = _BLOCK_NAME.fullmatch(entry.name)
                    if match is None:
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # another process evicted it just now
                    if stat.S_ISREG(status.st_mode) and status.st_size == self._block_bytes:
                        key = OffloadKey(bytes.fromhex(match[1]))
                        yield BlockInfo(key=key, bytes=status.st_size, time=status.st_mtime)
                    else:
                        Path(entry.path).unlink(missing_ok=True)

    def _path(self, key: OffloadKey) -> Path:
        name = key.hex()
        return self._directory / name[:2] / f"{name}.kv"

    def _publish(self, path: Path, content: memoryview) -> None:
        """Write *content* under a name of its own, then rename it to *path*."""
        for attempt in range(_WRITE_ATTEMPTS):
            temporary = self._tmp / f"{os.getpid()}-{secrets.token_hex(8)}"
            try:
                self._write(temporary, content)
                self._rename(temporary, path)
            except FileNotFoundError:
                # Where locks don't work, a process that opens the namespace may take our file for a leftover.
                if attempt + 1 == _WRITE_ATTEMPTS:
                    raise
            else:
                return
            finally:
                temporary.unlink(missing_ok=True)

    def _write(self, temporary: Path, content: memoryview) -> None:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _lock(fd)
            done = 0
            while done < len(content):
                done += os.write(fd, content[done:])
        finally:
            os.close(fd)

    def _rename(self, temporary: Path, path: Path) -> None:
        try:
            temporary.rename(path)
        except FileNotFoundError:
            # The first block of this folder: made now, because making all 256 at the start takes far longer.
            path.parent.mkdir(exist_ok=True)
            temporary.rename(path)

    def _remove_leftovers(self) -> None:
        with os.scandir(self._tmp) as entries:
            for entry in entries:
                if not _has_writer(entry.path):
                    Path(entry.path).unlink(missing_ok=True)


def _lock(fd: int) -> None:
    """Show other processes that this file has a writer, as far as the file system can. Bytes never depend on it."""
    with contextlib.suppress(OSError):  # without locks leftovers are told by their age
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _has_writer(path: str) -> bool:
    """Whether the temporary file *path* may still be being written. The kernel drops the locks of dead processes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # renamed just now
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return time.time() - os.fstat(fd).st_mtime < _STALE_AFTER_S
    finally:
        os.close(fd)
    return False
