"""Takes the pool's pages from the machine before they are needed, in the background, in huge pages where it can.

Without it the first write to each row pays for its page faults: 190 MB read from the page cache took 0.13 s into fresh
rows and 0.04 s into rows that had their pages (``MADV_POPULATE_WRITE``, Linux 5.14; older kernels go without).

Huge pages (2 MiB on most machines) matter to disks: a disk call into pages of 4 KiB that lie anywhere becomes many
small requests. Into huge pages a virtual disk read 2.5 to 3.5 times as fast, for a quarter of the processor time
(``docs/benchmarks/disk.md``). Shared memory gets them at the first touch only where ``shmem_enabled`` says so, which by
default it does not. ``MADV_COLLAPSE`` (Linux 6.1) moves into one what is there already, unless that says ``deny``. It
needs a mapping at an address that is a multiple of a huge page. See madvise(2).

Decides nothing about rows: contents stay as they are, whoever uses them meanwhile.
"""

import ctypes
import errno
import logging
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path

from kvtier_core.transfer.memory import format_size
from kvtier_core.transfer.waiting import bounded

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_CHUNK_BYTES = 16 << 20
"""A few milliseconds of work: how long ``stop`` waits at most."""
_TELL_FROM = 16
"""A warning comes from this fraction of the pool on: 1 in 16."""

_log = logging.getLogger("kvtier.pool")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def advise(address: int, length: int, advice: int) -> None:
    """madvise(2), without the interpreter's lock. Raises ``OSError``."""
    if _libc.madvise(address, length, advice) != 0:
        raise _error()


def _map(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _libc.mmap(address, length, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        raise _error()
    return found


def ask_for_huge_pages(mapping: mmap.mmap) -> None:
    """Let the kernel use them at first touch where its settings allow that. Says nothing where it has none."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel that was built without
            raise


class HugePages:
    """A second mapping of the pool's file, at ``address``, through which its pages are moved into huge ones.

    Methods belong to one thread. The mapping takes addresses, and no memory.
    """

    def __init__(self, fd: int, length: int, size: int) -> None:
        """The first *length* bytes of *fd*, in huge pages of *size* bytes. Raises ``OSError``."""
        self.size = size
        self._length = length
        self._refused: list[int] = []
        """Where the huge pages begin that could not be had yet."""
        self._reason = 0
        self._reserved = _map(None, length + size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.address = -(-self._reserved // size) * size
        try:
            _map(self.address, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            self._unmap()
            raise

    def take(self, begin: int, end: int) -> None:
        """Put bytes *begin*, a multiple of their size, to *end* into huge pages; less than one stays as it is."""
        places = range(begin, end - self.size + 1, self.size)
        self._refused += [place for place in places if not self._get(place)]

    def finish(self) -> int:
        """Try again what was in use or not to be had, and give the addresses back.

        Returns why the kernel refused, an ``errno``, after a warning; 0 when no more than a sixteenth is missing.
        """
        refused = len(self._refused) - sum(map(self._get, self._refused))
        self._unmap()
        if refused * self.size * _TELL_FROM <= self._length:
            return 0
        _warn(refused * self.size, self._reason)
        return self._reason

    def _get(self, place: int) -> bool:
        if self._reason == errno.EINVAL:  # a kernel that does not do it at all is asked once
            return False
        try:
            advise(self.address + place, mmap.PAGESIZE, MADV_POPULATE_WRITE)  # of nothing none is made
            advise(self.address + place, self.size, _MADV_COLLAPSE)
        except OSError as error:
            self._reason = error.errno or errno.EINVAL
            return False
        return True

    def _unmap(self) -> None:
        _libc.munmap(self._reserved, self._length + self.size)


def map_for_huge_pages(fd: int, length: int) -> HugePages | None:
    """``HugePages`` of the first *length* bytes of *fd*; ``None``, with a warning, where there can be none.

    A file smaller than one huge page needs none, and gets no warning.
    """
    try:
        size = int(_SIZE.read_text())
    except (OSError, ValueError):  # a kernel without
        _warn(length, errno.EINVAL)
        return None
    try:
        return HugePages(fd, length, size) if length >= size else None
    except OSError as error:
        _warn(length, error.errno or errno.EINVAL)
        return None


def _warn(num_bytes: int, code: int) -> None:
    _log.warning(
        "%s of the pool are in small pages, into which a disk may be read at half the speed: %s",
        format_size(num_bytes),
        describe_refusal(code),
    )


def describe_refusal(code: int, setting: Path = _SHMEM_ENABLED) -> str:
    """Why the kernel gave no huge page, and what to do, for people."""
    if code != errno.EINVAL:
        return os.strerror(code)
    try:
        chosen = setting.read_text().strip()
    except OSError:
        chosen = "nothing"
    return (
        f"this needs Linux 6.1, or 'advise' written to {setting}, which says {chosen}; "
        "pool.huge_pages = false takes 4 KiB pages without a word"
    )


class Prefault:
    """One background pass over a mapping. The interpreter goes on meanwhile: ctypes lets go of its lock."""

    def __init__(
        self,
        mapping: mmap.mmap,
        address: int,
        length: int,
        huge_pages: HugePages | None = None,
        cpus: frozenset[int] | None = None,
    ) -> None:
        """Start at once. *mapping*, which begins at *address*, is kept until the pass has ended: its owner may be gone.

        It is not to be closed before ``stop`` has returned. *huge_pages*, of the same bytes, is finished at the end.
        *cpus* are where the pass runs: memory lies on the NUMA node of the processor that touches it first. Raises
        ``RuntimeError`` where no thread can be had.
        """
        self._mapping = mapping
        self._address = address
        self._length = length
        self._huge_pages = huge_pages
        self._cpus = cpus
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-prefault", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._finish()
            raise

    def stop(self) -> None:
        """End the pass where it is, and return when it no longer touches the mapping. Twice is fine."""
        self._stopping.set()
        self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the pass; whether it came in time."""
        self._thread.join(bounded(timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        chunk = _CHUNK_BYTES if self._huge_pages is None else max(_CHUNK_BYTES, self._huge_pages.size)
        if self._cpus is not None:
            with suppress(OSError):  # they may have gone
                os.sched_setaffinity(0, self._cpus)  # of this thread
        try:
            for begin in range(0, self._length, chunk):
                if self._stopping.is_set():
                    return
                end = min(begin + chunk, self._length)
                if self._huge_pages is not None:
                    self._huge_pages.take(begin, end)
                advise(self._address + begin, end - begin, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14
                _log.warning("the pool's memory is taken as it is used: %s", error.strerror)
        finally:
            self._finish()

    def _finish(self) -> None:
        if self._huge_pages is not None:
            self._huge_pages.finish()
