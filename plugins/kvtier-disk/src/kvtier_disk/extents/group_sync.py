"""One sync for many: whoever asks while a sync runs shares the next one, instead of queueing for one of its own.

A flush of the device takes milliseconds and covers all that was written before it; threads that each flush wait for one
another. Decides only who flushes. Safe from any thread.
"""

import threading
from collections.abc import Callable


class GroupSync:
    """Syncs of one file. *flush* lets everything written so far reach the disk, or raises ``OSError``."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._changed = threading.Condition()
        self._asked = 0
        self._done = 0  # so many of those who asked have their answer
        self._flushing = False
        self._failed: dict[int, OSError] = {}

    def sync(self) -> None:
        """Return once everything written before the call is on the disk. Raises ``OSError`` when its flush failed."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            while self._flushing and self._done < mine:
                self._changed.wait()
            if self._done >= mine:
                self._raise(mine)
                return
            self._flushing = True
            covered = range(self._done + 1, self._asked + 1)
        error = self._try_flush()
        with self._changed:
            if error is not None:
                self._failed.update(dict.fromkeys(covered, error))
            self._done = covered[-1]
            self._flushing = False
            self._changed.notify_all()
            self._raise(mine)

    def _try_flush(self) -> OSError | None:
        try:
            self._flush()
        except OSError as error:
            return error
        return None

    def _raise(self, mine: int) -> None:
        error = self._failed.pop(mine, None)
        if error is not None:
            raise OSError(error.errno, error.strerror, error.filename)
