"""The pool: the primary tier's host memory, one shared mapping of rows behind a control page.

It decides whether two processes mean the same geometry, and who of them is who. It never decides what a row holds.

One process makes a pool for itself with ``Pool.create``. Several that start in any order all call ``Pool.open`` with
one name: worker 0 makes the memory, and the others find it in /proc, among the open files of the processes that have
it. It counts while a member lives: one that a forked child of a dead engine still has is passed over. The kernel frees
it with the last process that has it open, and lets no other user open it. Layout, little-endian::

    0     magic "kvtpool" 0x07 | num_workers u64 | num_rows u64 | row_bytes u64 | bytes before row 0 u64
    64    the control page's words (see ``control``), zero padding to a page of the kernel's (4096 bytes, or 65536)
    ...   row 0 | row 1 | ... | the maker's note, outside the mapping
"""

import errno
import logging
import mmap
import os
import re
import struct
import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtier_core.transfer.control import PAGE_BYTES, SCHEDULER, ControlPage, control_words_bytes
from kvtier_core.transfer.members import Members, already_there, has_members, wait_for
from kvtier_core.transfer.memory import find_memory, format_size, make_memory
from kvtier_core.transfer.prefault import Prefault, ask_for_huge_pages, map_for_huge_pages
from kvtier_core.transfer.waiting import bounded

_MAGIC = b"kvtpool\x07"
_HEADER = struct.Struct("<8sQQQQ")
_HEADER_BYTES = 64
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MEMORY_NAME = "kvtier-pool"
_MAX_NOTE_BYTES = 1 << 16
_OPEN_TIMEOUT_S = 60.0
_LOOK_S = 0.02
"""Between two looks for a memory that nobody has made yet."""

_log = logging.getLogger("kvtier.pool")

_KEPT: "list[Pool]" = []
"""Pools that stay mapped when nobody has them any more."""


@dataclass(frozen=True, kw_only=True)
class PoolGeometry:
    """The shape of a pool, which every process that shares it must agree on.

    ``row_bytes`` is a multiple of 4096. Raises ``ValueError`` for a shape that can't be.
    """

    num_rows: int
    row_bytes: int
    num_workers: int = 1

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.num_workers < 1:
            raise ValueError(f"a pool needs at least one row and one worker: {self}")
        if self.row_bytes < PAGE_BYTES or self.row_bytes % PAGE_BYTES:
            raise ValueError(f"row_bytes must be a positive multiple of {PAGE_BYTES}: {self}")

    @cached_property
    def rows_offset(self) -> int:
        """Bytes before row 0, in whole pages of the kernel's: a GPU's driver pins no less."""
        page = mmap.PAGESIZE
        return -(-(_HEADER_BYTES + control_words_bytes(self.num_workers)) // page) * page

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole mapping."""
        return self.rows_offset + self.num_rows * self.row_bytes

    def describe(self) -> str:
        """For messages."""
        return f"a pool of {format_size(self.total_bytes)} ({self.num_rows} rows of {self.row_bytes} bytes)"

    def pack(self) -> bytes:
        """The header that says so."""
        return _HEADER.pack(_MAGIC, self.num_workers, self.num_rows, self.row_bytes, self.rows_offset)

    def make_memory(self, name: str = _MEMORY_NAME, note: bytes = b"") -> int:
        """A descriptor of new memory of this shape. Raises ``MemoryError``."""
        return make_memory(name, self.total_bytes, self.pack(), note, self.describe())


class Pool:
    """One process's view of the pool. Made by ``create``, or by ``open`` where several are to share it.

    Rows may be used from any thread. A pool that nobody closes goes in silence when nobody has it, its rows or its
    array any more.
    """

    def __init__(
        self, fd: int, geometry: PoolGeometry, *, huge_pages: bool = False, members: Members | None = None
    ) -> None:
        """Map *fd*, ``geometry.total_bytes`` long; it is closed with the pool. Raises ``MemoryError``."""
        self.geometry = geometry
        self.note = os.pread(fd, _MAX_NOTE_BYTES, geometry.total_bytes)
        """What the process that made the pool left for the others."""
        try:
            self._mapping = mmap.mmap(fd, geometry.total_bytes)
        except OSError as error:
            if error.errno != errno.ENOMEM:  # which is a limit on this process's addresses
                raise
            raise MemoryError(f"the kernel refused to map {geometry.describe()}: {error}") from error
        self._huge_pages = huge_pages
        if huge_pages:
            ask_for_huge_pages(self._mapping)
        self._fd: int | None = fd
        self._view = memoryview(self._mapping)
        self.control = ControlPage(self._view[_HEADER_BYTES : geometry.rows_offset], geometry.num_workers)
        flat = np.frombuffer(self._mapping, dtype=np.uint8, offset=geometry.rows_offset)
        self._rows: npt.NDArray[np.uint8] | None = flat.reshape(geometry.num_rows, geometry.row_bytes)
        self._prefault: Prefault | None = None
        self._members = members
        # With the mapping, not with this object: a process that still uses rows is a member that long.
        self._abandon = weakref.finalize(self._mapping, _let_go, fd, members)
        self._abandon.atexit = False  # the kernel does all that, and tiers may still be at work

    @classmethod
    def create(cls, geometry: PoolGeometry, *, huge_pages: bool = False) -> Self:
        """Make a new pool, all zeros. The machine gives pages when they are first touched.

        *huge_pages* asks for 2 MiB pages, at the first touch or by ``prefault``. Raises ``MemoryError``, before
        anything is mapped, when the pool does not fit this machine's available memory or this process's control group.
        """
        fd = geometry.make_memory()
        try:
            return cls(fd, geometry, huge_pages=huge_pages)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(
        cls,
        geometry: PoolGeometry | None,
        name: str,
        member: int = SCHEDULER,
        *,
        note: bytes = b"",
        huge_pages: bool = False,
        timeout_s: float = _OPEN_TIMEOUT_S,
    ) -> Self:
        """Share the pool of the engine *name* (letters, digits, ``._-``, at most 64), as *member* (a worker's number).

        Every process of the engine on this machine calls this, in any order, with the same geometry; then
        ``wait_for_members``. Worker 0 makes the pool, and its *note* (at most 64 KiB) is every member's ``note``. The
        others wait for it, those that do not know the geometry with ``None``. A process that starts again joins the
        pool that any of the others still has.

        Raises ``MemoryError`` when the pool does not fit, ``ValueError`` for another geometry than the others' or a
        member that the pool does not have, ``FileExistsError`` when a living process is that member, ``OSError`` of
        ``EOWNERDEAD`` when a process that died left the pool of no use, ``TimeoutError`` when nobody makes it.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a pool: use 1 to 64 letters, digits, '.', '_' and '-'")
        if len(note) > _MAX_NOTE_BYTES:
            raise ValueError(f"a note of {len(note)} bytes is longer than {_MAX_NOTE_BYTES}")
        memory_name = f"{_MEMORY_NAME}-{name}"
        with ExitStack() as on_failure:
            fd = find_memory(memory_name, has_members)
            if fd is None and member == 0 and geometry is not None:
                fd = geometry.make_memory(memory_name, note)
            elif fd is None:
                fd = _await_memory(memory_name, name, timeout_s)
            on_failure.callback(os.close, fd)
            found = _read_geometry(fd, name, geometry)
            members = Members(fd, found.num_workers)
            on_failure.callback(members.close)
            members.join(member)
            if member == 0:
                _refuse_second(memory_name, fd)
            pool = cls(fd, found, huge_pages=huge_pages, members=members)
            on_failure.pop_all()
            on_failure.callback(pool.close)
            members.begin(pool.control, name)
            on_failure.pop_all()
        return pool

    def wait_for_members(self, timeout_s: float = _OPEN_TIMEOUT_S) -> None:
        """Wait until the scheduler and every worker have joined. Raises ``TimeoutError`` that says who is missing."""
        if self._members is not None:
            self._members.wait_for_all(self.control, timeout_s)

    def wait_for_copies(self, timeout_s: float) -> bool:
        """Wait until every transfer that any worker, in any process, was handed by now is over; False on time-out.

        Until then the engine's KV memory must not be given up.
        """
        return wait_for(lambda: self.control.is_idle, bounded(timeout_s))

    def prefault(self, cpus: frozenset[int] | None = None) -> Prefault:
        """Take the pool's pages from the machine now, in the background, in huge pages if asked for.

        On one of *cpus*, if given: the pages come from the memory near it, while there is any. A warning says where the
        kernel gives no huge pages. Raises ``RuntimeError`` where no thread can be had.
        """
        if self._prefault is None:
            length = self.geometry.total_bytes
            huge_pages = map_for_huge_pages(self.fd, length) if self._huge_pages else None
            address = self.address - self.geometry.rows_offset
            self._prefault = Prefault(self._mapping, address, length, huge_pages, cpus)
        return self._prefault

    def wait_for_prefault(self, timeout_s: float) -> bool:
        """Wait until no pass of ``prefault`` is under way in this process; False on time-out."""
        return self._prefault is None or self._prefault.wait(timeout_s)

    @property
    def fd(self) -> int:
        """The file descriptor of the memory. Row 0 is at ``geometry.rows_offset``."""
        if self._fd is None:
            raise ValueError("the pool is closed")
        return self._fd

    @property
    def rows_array(self) -> npt.NDArray[np.uint8]:
        """All rows, shared and writable. Drop it before ``close``."""
        if self._rows is None:
            raise ValueError("the pool is closed")
        return self._rows  # (num_rows, row_bytes)

    @property
    def address(self) -> int:
        """The address of row 0 in this process, page-aligned."""
        return int(self.rows_array.ctypes.data)

    def row(self, index: int) -> memoryview:
        """The bytes of one row, shared and writable, without a copy. Raises ``IndexError``.

        Drop it before ``close``.
        """
        if not 0 <= index < self.geometry.num_rows:
            raise IndexError(f"row {index} is not one of the pool's {self.geometry.num_rows}")
        begin = self.geometry.rows_offset + index * self.geometry.row_bytes
        return self._view[begin : begin + self.geometry.row_bytes]

    def keep(self) -> None:
        """Keep the pool mapped after ``close``: a tier that does not answer knows its address and its descriptor."""
        _KEPT.append(self)
        _log.warning(
            "the pool's mapping (%s) is kept until this process ends: a tier that has not shut down may still touch it",
            format_size(self.geometry.total_bytes),
        )

    def close(self) -> bool:
        """Unmap the pool and close its descriptor; True when the mapping is gone. May be called again.

        False after ``keep``, or while somebody holds a row or the array: the mapping is kept, and a write to it stays
        harmless.
        """
        if self._prefault is not None:
            self._prefault.stop()
        if self in _KEPT:
            return False
        if self._fd is not None:
            self._abandon()
            self._fd = None
            self._rows = None
            self._view.release()
            self.control.release()
        try:
            self._mapping.close()
        except BufferError:
            size = format_size(self.geometry.total_bytes)
            _log.warning("the pool's mapping (%s) is kept: rows are still in use", size)
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _let_go(fd: int, members: Members | None) -> None:
    """Let go of all but the mapping."""
    if members is not None:
        members.close()
    os.close(fd)


def _await_memory(memory_name: str, name: str, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while (fd := find_memory(memory_name, has_members)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"nobody made the pool {name!r} within {timeout_s:g} s: worker 0, which is to make it, did not start, "
                "or runs on another machine, in another container or as another user"
            )
        time.sleep(_LOOK_S)
    return fd


def _refuse_second(memory_name: str, fd: int) -> None:
    """Raises ``FileExistsError`` where another worker 0 made a memory at the same time: one of the two sees it."""
    own = os.fstat(fd)
    other = find_memory(memory_name, lambda it: has_members(it) and not os.path.samestat(own, os.fstat(it)))
    if other is not None:
        os.close(other)
        raise already_there(0)


def _read_geometry(fd: int, name: str, expected: PoolGeometry | None) -> PoolGeometry:
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ValueError(
            f"the pool {name!r} is of another version of kvtier: all processes of one engine need the same"
        )
    _, num_workers, num_rows, row_bytes, _ = _HEADER.unpack(header)
    geometry = PoolGeometry(num_rows=num_rows, row_bytes=row_bytes, num_workers=num_workers)
    if expected is not None and geometry != expected:
        raise ValueError(
            f"the pool {name!r} is {geometry}, this process expects {expected}: "
            "all processes of one engine need the same configuration and kvtier version"
        )
    return geometry
