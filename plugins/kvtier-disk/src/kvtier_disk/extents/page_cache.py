"""Which part of a file the page cache holds, without a change to it, and how much more it could hold.

The first is ``cachestat``, from Linux 6.5 on.

A read with ``RWF_NOWAIT`` tells as well, but where it finds nothing it makes the kernel read ahead.
"""

import ctypes
import mmap
import platform
from pathlib import Path

_CACHESTAT = 451
"""The call's number on the machines named below."""
_MACHINES = ("x86_64", "aarch64")


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


_syscall = ctypes.CDLL(None).syscall if platform.machine() in _MACHINES else None


def cached_share(fd: int, offset: int, size: int) -> float:
    """The share of a file's bytes that are in the page cache: 0 as well where the kernel does not tell."""
    if _syscall is None:
        return 0.0
    counts = _Counts()
    asked = _Range(offset, size)
    if _syscall(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(counts), 0) != 0:
        return 0.0
    pages = (offset + size - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    return float(counts.cached / pages)


def available_bytes() -> int:
    """The memory that the kernel could give to others, what it may drop from the page cache included; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
