"""Tells people what stood in a block's place, the first time and then ever more rarely. Decides nothing else."""

import logging
import threading


class Strangers:
    """Warnings of one tier instance. Safe from any thread."""

    def __init__(self, log: logging.Logger, tier: str) -> None:
        self._log = log
        self._tier = tier
        self._lock = threading.Lock()
        self._count = 0

    def note(self, text: str) -> None:
        """Warn of one, unless many came before (at powers of two): a damaged disk can hold as many as blocks."""
        with self._lock:
            self._count += 1
            count = self._count
        if count & (count - 1) == 0:
            seen = f" Seen {count} times." if count > 1 else ""
            self._log.warning("tier %r (kvtier-disk): %s.%s", self._tier, text, seen)
