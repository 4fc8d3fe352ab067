"""Takes the pool's pages from the machine before they are needed, in the background.

Without it the first write to each row pays for its page faults: 190 MB read from the page cache took 0.13 s into fresh
rows and 0.04 s into rows that had their pages. Decides nothing about rows: contents stay as they are, whoever uses
them meanwhile (``MADV_POPULATE_WRITE``, Linux 5.14; older kernels go without).
"""

import errno
import logging
import mmap
import threading

from kvtier_core.transfer.huge_pages import MADV_POPULATE_WRITE, HugePages, advise
from kvtier_core.transfer.waiting import bounded

_CHUNK_BYTES = 16 << 20
"""A few milliseconds of work: how long ``stop`` waits at most."""

_log = logging.getLogger("kvtier.pool")


class Prefault:
    """One background pass over a mapping. The interpreter goes on meanwhile: ctypes lets go of its lock."""

    def __init__(
        self, mapping: mmap.mmap, address: int, length: int, huge_pages: HugePages | None = None
    ) -> None:
        """Start at once. *mapping*, which begins at *address*, is kept until the pass has ended: its owner may be gone.

        It is not to be closed before ``stop`` has returned. *huge_pages*, of the same bytes, is finished at the end.
        Raises ``RuntimeError`` where no thread can be had.
        """
        self._mapping = mapping
        self._address = address
        self._length = length
        self._huge_pages = huge_pages
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
