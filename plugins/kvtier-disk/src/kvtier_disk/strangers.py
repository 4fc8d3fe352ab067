"""Tells people what stood in a block's place: the first, and at the end how many there were. Decides nothing else."""

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
        """Warn of the first one: a damaged disk can hold as many as blocks."""
        with self._lock:
            self._count += 1
            is_first = self._count == 1
        if is_first:
            self._log.warning(
                "tier %r (kvtier-disk): %s. Others like it are counted, and told of when the tier closes",
                self._tier,
                text,
            )

    def sum_up(self) -> None:
        """Warn of how many there were, if there were several, and begin to count again."""
        with self._lock:
            count, self._count = self._count, 0
        if count > 1:
            self._log.warning(
                "tier %r (kvtier-disk): %d files in the places of blocks were no whole blocks; look for what changes"
                " files below root",
                self._tier,
                count,
            )
