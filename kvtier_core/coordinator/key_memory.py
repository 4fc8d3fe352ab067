"""A bounded memory of keys that costs one set operation a key, because it forgets many at once."""

from collections.abc import Collection

from kvtier_core.keys import OffloadKey


class KeyMemory:
    """Remembers the last *limit* keys or more, at most twice as many: two generations, the older one goes as a whole.

    Forgetting is spread over later calls, so that no call pays for what others remembered.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._young: set[OffloadKey] = set()
        self._old: set[OffloadKey] = set()
        self._leaving: set[OffloadKey] = set()

    def add(self, keys: Collection[OffloadKey]) -> None:
        """Remember *keys*."""
        self._young.update(keys)
        for _ in range(min(2 * len(keys), len(self._leaving))):
            self._leaving.pop()
        if len(self._young) >= self._limit:
            self._young, self._old, self._leaving = set(), self._young, self._old

    def __len__(self) -> int:
        """How many keys are remembered, those in both generations twice."""
        return len(self._young) + len(self._old)

    def __contains__(self, key: OffloadKey) -> bool:
        """Whether *key* is remembered."""
        return key in self._young or key in self._old

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old, self._leaving = set(), set(), set()
