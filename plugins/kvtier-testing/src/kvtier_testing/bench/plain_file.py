"""What a directory's device does by itself: the same bytes, moved by plain calls to one file."""

import errno
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier_testing.bench.rows import Measured, Rows, timed


class Bare:
    """As many threads, the same calls and syncs into one preallocated file, and nothing else."""

    name = "bare"

    def __init__(self, directory: Path, threads: int) -> None:
        self._threads = threads
        self._path = directory / "bare"

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        return self._move(rows, os.pwritev, sync=True)

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        return self._move(rows, os.preadv, sync=False)

    def _move(
        self, rows: Rows, call: Callable[[int, Sequence[memoryview], int], int], *, sync: bool
    ) -> Measured:
        fd = _open(self._path)
        os.posix_fallocate(fd, 0, rows.total_bytes)
        jobs: queue.SimpleQueue[range | None] = queue.SimpleQueue()

        def serve() -> None:
            while (job := jobs.get()) is not None:
                size = call(fd, [rows.view(index) for index in job], job.start * rows.row_bytes)
                if size != len(job) * rows.row_bytes:
                    raise RuntimeError("short")
                if sync:
                    os.fdatasync(fd)

        def work() -> None:
            threads = [threading.Thread(target=serve) for _ in range(self._threads)]
            for item in (*rows.jobs(), *[None] * self._threads):
                jobs.put(item)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        try:
            return timed(work)
        finally:
            os.close(fd)

    def clear(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Leave nothing."""
        self._path.unlink(missing_ok=True)


def _open(path: Path) -> int:
    """A file past the page cache; through it on a file system that knows no other way."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)
