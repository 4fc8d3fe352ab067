"""The blocks that a tier did not get, one entry for each store that was dropped. Pure."""

from collections import deque
from collections.abc import Sequence

from kvtier_core.keys import OffloadKey
from kvtier_core.values import RequestInfo


class Missed:
    """At most *limit* keys; past that the oldest stores are forgotten, each as a whole. No key is looked at."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_keys = 0
        """To be read only."""
        self._entries: deque[tuple[RequestInfo, Sequence[OffloadKey]]] = deque()

    def add(self, request: RequestInfo, keys: Sequence[OffloadKey]) -> None:
        """The tier did not get *keys* of *request*."""
        if not keys:
            return
        self._entries.append((request, keys))
        self.num_keys += len(keys)
        while self.num_keys > self._limit:
            self.num_keys -= len(self._entries.popleft()[1])

    def take(self, n: int) -> tuple[RequestInfo, Sequence[OffloadKey]]:
        """The oldest entry, or the first *n* keys of it."""
        request, keys = self._entries.popleft()
        if len(keys) > n:
            self._entries.appendleft((request, keys[n:]))
            keys = keys[:n]
        self.num_keys -= len(keys)
        return request, keys

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.num_keys = 0
