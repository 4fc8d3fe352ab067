"""A bounded memory of evicted keys, oldest forgotten first."""

from collections import OrderedDict
from collections.abc import Iterable

from kvtier_core.tier import OffloadKey


class Ghosts:
    """At most *limit* keys."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # OrderedDict and not dict: a dict emptied from the front leaves gaps that each later look at the front
        # walks over, which would make the cost of forgetting grow with what was forgotten before.
        self._keys: OrderedDict[OffloadKey, None] = OrderedDict()

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._keys)

    def __contains__(self, key: OffloadKey) -> bool:
        """Whether *key* is remembered."""
        return key in self._keys

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Remember keys that are not remembered yet, as the newest, in this order."""
        remembered = self._keys
        for key in keys:
            remembered[key] = None
        while len(remembered) > self._limit:
            remembered.popitem(last=False)

    def forget(self, key: OffloadKey) -> None:
        """Forget *key*, which is remembered."""
        del self._keys[key]
