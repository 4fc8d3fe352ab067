"""Where the blocks of one namespace are: it stands for the client of a storage service, and a vendor replaces it.

Its calls block, may come from any thread, and take ``latency`` seconds each, as a service far away would. It decides
which blocks leave when it is full: those used least lately.
"""

import threading
import time
from collections import OrderedDict

from kvtier_core.tier import OffloadKey


class Bucket:
    """At most *capacity* bytes of blocks (``None``: no bound)."""

    def __init__(self, capacity: int | None, latency: float) -> None:
        self._capacity = capacity
        self._latency = latency
        self._lock = threading.Lock()
        self._blocks: OrderedDict[OffloadKey, bytes] = OrderedDict()
        self._bytes = 0

    def has(self, key: OffloadKey) -> bool:
        """Whether the block is here."""
        time.sleep(self._latency)
        with self._lock:
            return key in self._blocks

    def put(self, key: OffloadKey, block: memoryview) -> list[OffloadKey]:
        """Keep a copy: there whole on return. Returns the blocks that had to leave for it.

        Raises ``OSError`` when it is larger than the bucket.
        """
        time.sleep(self._latency)
        if self._capacity is not None and len(block) > self._capacity:
            raise OSError(f"a block of {len(block)} bytes does not fit into a bucket of {self._capacity}")
        copy = bytes(block)
        left: list[OffloadKey] = []
        with self._lock:
            self._bytes += len(copy) - len(self._blocks.pop(key, b""))
            self._blocks[key] = copy
            while self._capacity is not None and self._bytes > self._capacity:
                oldest, dropped = self._blocks.popitem(last=False)
                self._bytes -= len(dropped)
                left.append(oldest)
        return left

    def remove(self, key: OffloadKey) -> None:
        """Forget the block, if it is here; at once."""
        with self._lock:
            self._bytes -= len(self._blocks.pop(key, b""))

    def get(self, key: OffloadKey, into: memoryview) -> bool:
        """Fill *into*; false when the block is not here. Raises ``ValueError`` when it has another size."""
        time.sleep(self._latency)
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                return False
            self._blocks.move_to_end(key)
        into[:] = block
        return True
