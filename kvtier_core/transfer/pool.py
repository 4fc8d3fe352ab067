"""The pool: the primary tier's host memory, one anonymous shared mapping of rows behind a control page.

It decides whether the memory fits and whether two processes mean the same geometry. It never decides what a
row holds.

The memory is a memfd: it has no name, other processes open it through ``/proc/<pid>/fd/<n>``, and the kernel
frees it with the last process that has it open, however that process ends. It is sealed against resizing, so
that a mapped row can't vanish under a reader. Layout, little-endian::

    0     magic "kvtpool" 0x01 | num_workers u64 | num_rows u64 | row_bytes u64 | bytes before row 0 u64
    64    the control page's words (see ``control``), zero padding to a multiple of 4096
    ...   row 0 | row 1 | ...
"""

import fcntl
import logging
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtier_core.transfer.control import PAGE_BYTES, ControlPage, control_words_bytes
from kvtier_core.transfer.memory import find_memory_limit
from kvtier_core.transfer.prefault import Prefault

_MAGIC = b"kvtpool\x01"
_HEADER = struct.Struct("<8sQQQQ")
_HEADER_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_log = logging.getLogger("kvtier.pool")


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

    @property
    def rows_offset(self) -> int:
        """Bytes before row 0, a multiple of 4096."""
        return -(-(_HEADER_BYTES + control_words_bytes(self.num_workers)) // PAGE_BYTES) * PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole mapping."""
        return self.rows_offset + self.num_rows * self.row_bytes

    def pack(self) -> bytes:
        """The header that says so."""
        return _HEADER.pack(_MAGIC, self.num_workers, self.num_rows, self.row_bytes, self.rows_offset)


class Pool:
    """One process's view of the pool. Made by ``create`` in one process and ``attach`` in the others.

    Rows may be used from any thread; what they hold at a time is for the caller to agree on.
    """

    def __init__(self, fd: int, geometry: PoolGeometry) -> None:
        """Map *fd*, ``geometry.total_bytes`` long; it is closed with the pool. Raises ``OSError``."""
        self.geometry = geometry
        self._mapping = mmap.mmap(fd, geometry.total_bytes)
        self._fd: int | None = fd
        self._view = memoryview(self._mapping)
        self.control = ControlPage(self._view[_HEADER_BYTES : geometry.rows_offset], geometry.num_workers)
        flat = np.frombuffer(self._mapping, dtype=np.uint8, offset=geometry.rows_offset)
        self._rows: npt.NDArray[np.uint8] | None = flat.reshape(geometry.num_rows, geometry.row_bytes)
        self._prefault: Prefault | None = None

    @classmethod
    def create(cls, geometry: PoolGeometry) -> Self:
        """Make a new pool, all zeros. Pages are taken from the machine when they are first touched.

        Raises ``MemoryError``, before anything is mapped, when the pool does not fit in this machine's
        available memory or in the limit of this process's control group.
        """
        limit = find_memory_limit()
        if geometry.total_bytes > limit.bytes:
            raise MemoryError(
                f"a pool of {_gib(geometry.total_bytes)} ({geometry.num_rows} rows of {geometry.row_bytes} "
                f"bytes) does not fit: {limit.source} leaves {_gib(limit.bytes)}. "
                "Set a smaller pool capacity or free memory."
            )
        fd = os.memfd_create("kvtier-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, geometry.total_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            os.pwrite(fd, geometry.pack(), 0)
            return cls(fd, geometry)
        except OSError as error:
            os.close(fd)
            raise MemoryError(
                f"the kernel refused a pool of {_gib(geometry.total_bytes)}: {error}"
            ) from error

    @classmethod
    def attach(cls, path: str, expected: PoolGeometry | None = None) -> Self:
        """Share the pool another process has open at *path*, its ``Pool.path``.

        Raises ``OSError`` when it can't be opened (its process is gone, or belongs to another user),
        ``ValueError`` when it is no pool or has another geometry than *expected*.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(fd, _read_geometry(fd, path, expected))
        except BaseException:
            os.close(fd)
            raise

    def prefault(self) -> Prefault:
        """Take the pool's pages from the machine now, in the background; ``close`` ends that."""
        if self._prefault is None:
            self._prefault = Prefault(self.address, self.geometry.num_rows * self.geometry.row_bytes)
        return self._prefault

    @property
    def fd(self) -> int:
        """The file descriptor of the memory. Row 0 is at ``geometry.rows_offset``."""
        if self._fd is None:
            raise ValueError("the pool is closed")
        return self._fd

    @property
    def path(self) -> str:
        """Where other processes of this user can open the pool while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

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

    def close(self) -> bool:
        """Unmap the pool and close its descriptor; True when the mapping is gone. May be called again.

        False: somebody still holds a row or the array, so the mapping is kept (a write to it stays harmless)
        until that is dropped and ``close`` called again, or the process ends.
        """
        if self._prefault is not None:
            self._prefault.stop()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._rows = None
            self._view.release()
            self.control.release()
        try:
            self._mapping.close()
        except BufferError:
            _log.warning(
                "the pool's mapping (%s) is kept: rows are still in use", _gib(self.geometry.total_bytes)
            )
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_geometry(fd: int, path: str, expected: PoolGeometry | None) -> PoolGeometry:
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ValueError(f"{path} is not a kvtier pool of this format version")
    _, num_workers, num_rows, row_bytes, _ = _HEADER.unpack(header)
    geometry = PoolGeometry(num_rows=num_rows, row_bytes=row_bytes, num_workers=num_workers)
    size = os.fstat(fd).st_size
    if header != geometry.pack() or size != geometry.total_bytes:
        raise ValueError(f"{path} is damaged: its header says {geometry}, it is {size} bytes long")
    if expected is not None and geometry != expected:
        raise ValueError(
            f"the pool at {path} is {geometry}, this process expects {expected}: "
            "all processes of one engine need the same configuration and kvtier version"
        )
    return geometry


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
