"""Least recently used: the candidate whose last use is longest ago leaves first."""

from collections import OrderedDict
from collections.abc import Container
from itertools import islice
from typing import Generic

from kvtier_core.policies.base import K


class LRU(Generic[K]):
    """``EvictionPolicy`` by recency alone. It remembers nothing of removed keys."""

    def __init__(self) -> None:
        # OrderedDict and not dict: a dict emptied from the front leaves gaps that each later look at the front
        # walks over, which would make the cost of `victims` grow with the evictions before it.
        self._candidates: OrderedDict[K, None] = OrderedDict()
        self._held: set[K] = set()

    def insert(self, key: K) -> None:
        """Learn an unknown key as the most recently used candidate."""
        assert key not in self._candidates, f"inserted twice: {key!r}"
        assert key not in self._held, f"inserted while held: {key!r}"
        self._candidates[key] = None

    def touch(self, key: K) -> None:
        """Make a candidate the most recently used one; no effect on other keys."""
        if key in self._candidates:
            self._candidates.move_to_end(key)

    def hold(self, key: K) -> None:
        """Take a known key out of the candidates."""
        if key not in self._held:
            del self._candidates[key]
            self._held.add(key)

    def release(self, key: K) -> None:
        """Make a known key the most recently used candidate."""
        if key in self._held:
            self._held.remove(key)
            self._candidates[key] = None
        else:
            self._candidates.move_to_end(key)

    def remove(self, key: K) -> None:
        """Forget a key, if it is known."""
        self._candidates.pop(key, None)
        self._held.discard(key)

    def victims(self, n: int, keep: Container[K]) -> list[K]:
        """The *n* candidates used longest ago that are not in *keep*, oldest first."""
        return list(islice((key for key in self._candidates if key not in keep), n))

    def __len__(self) -> int:
        """How many candidates there are."""
        return len(self._candidates)
