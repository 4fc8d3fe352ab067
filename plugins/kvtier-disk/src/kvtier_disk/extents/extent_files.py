"""Reads and writes rows in the extent files of one namespace: neighbouring rows in one call, without a copy.

Decides how bytes get to the disk: past the page cache (``O_DIRECT``) where file system and memory allow it, else
through it; and what is left in the page cache at the end. Never decides where a row goes, nor whether it is a block.
Safe from any thread.
"""

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier_core.tier import OffloadKey
from kvtier_disk.extents.advice import advised, bare
from kvtier_disk.extents.form import (
    ALIGNMENT,
    ENTRY_BYTES,
    HEADER_BYTES,
    Shape,
    make_entries,
    make_header,
    read_header,
)
from kvtier_disk.extents.found import OUT_OF_DESCRIPTORS
from kvtier_disk.extents.open_extent import OpenExtent, write_at
from kvtier_disk.folder import Folder, ForeignError, StrangerError

TAIL_BYTES = 64
"""The proof at the end of a row."""
_NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV, errno.ENOSYS})


class ExtentLostError(Exception):
    """What stands under an extent's name is not that extent."""


class ExtentFiles:
    """The extents in *folder*. At most *max_open* stay open, and those in use beyond it."""

    def __init__(
        self,
        folder: Folder,
        namespace: str,
        row_bytes: int,
        *,
        direct: bool,
        read_only: bool,
        max_open: int,
        warn_once: Callable[[str, str], None],
        check_root: Callable[[], None] | None = None,
    ) -> None:
        """No I/O. *check_root* raises ``OSError`` where no extent may be opened any more."""
        self._folder = folder
        self._namespace = namespace
        self._row_bytes = row_bytes
        self._direct = direct and row_bytes % ALIGNMENT == 0
        self._read_only = read_only
        self._max_open = max_open
        self._warn_once = warn_once
        self._check_root = check_root
        self._lost: set[int] = set()
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenExtent] = OrderedDict()

    def path_of(self, extent: int) -> Path:
        """Where an extent is."""
        return self._folder.path / _name(extent)

    # Whole extents.

    def make(self, extent: int, shape: Shape) -> None:
        """Make a new extent with room for all its rows. Raises ``OSError``; nothing is left then."""
        with self._folder.opened() as handle:
            fd = handle.make_file(_name(extent))
            try:
                write_at(fd, make_header(extent, shape, self._namespace), 0)
                os.fsync(fd)  # whatever happens from here on, what takes room can be told to be ours
                self._allocate(fd, shape.file_bytes)
                os.fsync(fd)
            except BaseException as error:
                with suppress(OSError):
                    handle.unlink(_name(extent))
                if isinstance(error, OSError):
                    raise advised(error, self.path_of(extent)) from None
                raise
            finally:
                os.close(fd)

    def _allocate(self, fd: int, size: int) -> None:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            self._warn_once(
                "fallocate",
                "this file system can't reserve room: a full disk shows only when blocks are stored",
            )
            os.ftruncate(fd, size)

    def remove(self, extent: int) -> None:
        """Remove an extent and give its room back at once, also where other processes have it open."""
        self.cut(extent)
        if self._is_ours():
            # A directory of that name is somebody's, in nobody's way.
            with self._folder.opened() as handle, suppress(IsADirectoryError):
                handle.unlink(_name(extent))

    def cut(self, extent: int) -> bool:
        """Give an extent's room back at once: what is left is no extent. False if it had none. Raises ``OSError``."""
        self.forget([extent])
        if not self._is_ours():
            return False
        try:
            with self._folder.opened() as handle:
                fd = handle.open_file(_name(extent), os.O_WRONLY)
        except (FileNotFoundError, StrangerError, ForeignError):
            return False
        try:
            status = os.fstat(fd)
            if status.st_nlink > 1:  # it has another name: cut, it would be gone for somebody else, too
                return False
            os.ftruncate(fd, 0)
            return status.st_size > 0
        finally:
            os.close(fd)

    def _is_ours(self) -> bool:
        """Whether the directory is there; what is behind a link, or could be changed by others, is not ours."""
        try:
            return self._folder.is_there()
        except ForeignError:
            return False

    def forget(self, extents: Sequence[int]) -> None:
        """Close these extents as soon as nobody uses them."""
        with self._lock:
            for extent in extents:
                opened = self._open.pop(extent, None)
                if opened is not None and opened.users == 0:
                    opened.close()

    def leave_in_cache(self, most_bytes: int, most_s: float) -> None:
        """Have the kernel read the extents used last into the page cache, for the process that comes next.

        Up to *most_bytes*, and waits no longer than *most_s*. Raises no error.
        """
        until = time.monotonic() + most_s
        with self._lock:
            for opened in reversed(self._open.values()):
                most_bytes -= opened.shape.file_bytes
                if most_bytes < 0 or opened.direct is None:
                    return
                with suppress(OSError):
                    opened.read_into_cache(until)

    def close(self) -> None:
        """Close everything."""
        self.forget(list(self._open))

    # Rows.

    def read(self, extent: int, first_slot: int, rows: Sequence[memoryview]) -> list[bool | OSError]:
        """Fill *rows* from neighbouring slots: True, False where there is no such extent, or what went wrong.

        Rows behind the end of a file that was cut are zeros, which prove nothing: the core counts them as damaged.
        """
        try:
            with self._using(extent) as opened:
                outcomes = self._read(opened, first_slot, rows)
                if False in outcomes:
                    self._fill_cut(
                        extent, opened, [row for row, read in zip(rows, outcomes, strict=True) if not read]
                    )
                return [True if outcome is False else outcome for outcome in outcomes]
        except ExtentLostError:
            self._lost.add(extent)
            return [False] * len(rows)
        except OSError as error:
            return [bare(error)] * len(rows)

    def _read(self, opened: OpenExtent, first_slot: int, rows: Sequence[memoryview]) -> list[bool | OSError]:
        offset = opened.shape.row_offset(first_slot)
        try:
            done = opened.read(rows, offset)
        except OSError as error:
            if len(rows) == 1:
                return [bare(error)]
            # One bad spot must not cost the neighbours.
            return [
                outcome
                for index, row in enumerate(rows)
                for outcome in self._read(opened, first_slot + index, [row])
            ]
        return [done >= (index + 1) * self._row_bytes for index in range(len(rows))]

    def _fill_cut(self, extent: int, opened: OpenExtent, rows: Sequence[memoryview]) -> None:
        """Let rows behind the file's end be zeros. Raises ``ExtentLostError`` where all of it was cut."""
        self._checked_shape(extent, opened.buffered)  # who takes an extent away cuts it to nothing
        self._warn_once(
            f"cut {extent}",
            f"{self.path_of(extent)} was cut to {os.fstat(opened.buffered).st_size} bytes of {opened.shape.file_bytes}:"
            " blocks that were behind are damaged, and computed anew. Look for what changes files below root",
        )
        for row in rows:
            row[:] = bytes(len(row))

    def write(
        self,
        extent: int,
        first_slot: int,
        keys: Sequence[OffloadKey],
        rows: Sequence[memoryview],
        time: float,
    ) -> None:
        """Write *rows* into neighbouring slots, and their keys into the table. Raises ``OSError``."""
        try:
            with self._using(extent) as opened:
                shape = opened.shape
                done = opened.move(os.pwritev, rows, shape.row_offset(first_slot))
                if done < sum(map(len, rows)):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path_of(extent)))
                # After the rows: a write through the page cache has the file to itself, so it waits for all rows that
                # are being written and holds up those that come. Here the threads are about to sync anyway.
                write_at(opened.buffered, make_entries(keys, time), shape.entry_offset(first_slot))
        except ExtentLostError as lost:
            self._lost.add(extent)
            raise OSError(errno.ENOENT, str(lost), str(self.path_of(extent))) from None

    def sync(self, extent: int) -> None:
        """Let what was written reach the disk, in the file that has the extent's name. Raises ``OSError``."""
        try:
            with self._using(extent) as opened:
                opened.group.sync()
                if self._is_in_place(extent, opened):
                    return
            why = "it was removed or exchanged while it was written, or others may change it now"
        except ExtentLostError as lost:
            why = str(lost)
        self.forget([extent])
        self._lost.add(extent)
        raise OSError(errno.ENOENT, why, str(self.path_of(extent)))

    def survey(self, extent: int) -> tuple[Shape, list[tuple[bytes, bytes]]]:
        """Shape, and for each slot the table's entry and the end of the row, to find out what is there.

        Cost: one small read a used slot. Raises ``ExtentLostError``, ``OSError``.
        """
        with self._using(extent) as opened:
            shape = opened.shape
            table = os.pread(opened.buffered, shape.slots * ENTRY_BYTES, HEADER_BYTES)
            entries = [table[at : at + ENTRY_BYTES] for at in range(0, len(table), ENTRY_BYTES)]
            end = shape.row_bytes - TAIL_BYTES
            return shape, [
                (
                    entry,
                    os.pread(opened.buffered, TAIL_BYTES, shape.row_offset(slot) + end)
                    if any(entry)
                    else b"",
                )
                for slot, entry in enumerate(entries)
            ]

    def look_after_open(self) -> None:
        """Find the open extents that were removed, exchanged, emptied or opened to others: lost, their room given back.

        Cost: one ``stat`` and a read of the header for each open extent. Raises ``OSError`` where the directory can't
        be looked at.
        """
        with self._lock:
            held = list(self._open.items())
        lost = [extent for extent, opened in held if not self._is_in_place(extent, opened)]
        self.forget(lost)
        self._lost.update(lost)

    def _is_in_place(self, extent: int, opened: OpenExtent) -> bool:
        with self._folder.opened() as handle:
            try:
                status = handle.status(_name(extent))
                self._checked_shape(extent, opened.buffered)
            except (FileNotFoundError, ExtentLostError):
                return False
            return os.path.samestat(status, opened.identity) and handle.problem(status) is None

    def take_lost(self) -> list[int]:
        """The extents that turned out to be lost since the last call."""
        lost = list(self._lost)
        self._lost.difference_update(lost)
        return lost

    # Descriptors.

    @contextmanager
    def _using(self, extent: int) -> Iterator[OpenExtent]:
        with self._lock:
            opened = self._open.get(extent)
            if opened is None:
                opened = self._open[extent] = self._open_extent(extent)
            opened.users += 1
            self._open.move_to_end(extent)
            self._shrink(self._max_open)
        try:
            yield opened
        finally:
            with self._lock:
                opened.users -= 1
                if opened.users == 0 and self._open.get(extent) is not opened:
                    opened.close()

    def _shrink(self, limit: int) -> None:
        surplus = len(self._open) - limit
        for extent in [extent for extent, opened in self._open.items() if opened.users == 0][
            : max(0, surplus)
        ]:
            self._open.pop(extent).close()

    def _open_extent(self, extent: int) -> OpenExtent:
        try:
            return self._try_open(extent)
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS:
                raise
        self._shrink(0)
        try:
            return self._try_open(extent)
        except OSError as error:
            raise advised(error, self.path_of(extent)) from None

    def _try_open(self, extent: int) -> OpenExtent:
        if self._check_root is not None:
            self._check_root()
        flags = os.O_RDONLY if self._read_only else os.O_RDWR
        opened = OpenExtent(Shape(row_bytes=self._row_bytes, slots=1))
        # Without the folder the whole root is gone, or not mounted: it may come back.
        with self._folder.opened() as handle:
            try:
                opened.buffered = opened.keep(handle.open_file(_name(extent), flags))
                opened.identity = os.fstat(opened.buffered)
                opened.shape = self._checked_shape(extent, opened.buffered)
                if self._direct:
                    opened.direct = opened.keep(handle.open_file(_name(extent), flags | os.O_DIRECT))
                    # Of what is cached nothing is to be read ahead.
                    os.posix_fadvise(opened.buffered, 0, 0, os.POSIX_FADV_RANDOM)
            except (FileNotFoundError, StrangerError, ForeignError) as error:
                opened.close()
                raise ExtentLostError(f"{self.path_of(extent)} is no extent of ours") from error
            except BaseException:
                opened.close()
                raise
        return opened

    def _checked_shape(self, extent: int, fd: int) -> Shape:
        path = self.path_of(extent)
        header = read_header(os.pread(fd, HEADER_BYTES, 0))
        if header is None:
            raise ExtentLostError(f"{path} has no header of an extent")
        found, shape, namespace = header
        if (found, shape.row_bytes, namespace) != (extent, self._row_bytes, self._namespace):
            raise ExtentLostError(f"{path} is an extent of {namespace!r}, number {found}")
        return shape


def _name(extent: int) -> str:
    return f"{extent:010x}.ext"
