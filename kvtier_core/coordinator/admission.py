"""Bounded memories of keys: how often they were offered (admission, C15), and which were evicted lately. Pure."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from kvtier_core.keys import OffloadKey


class Admission:
    """Which offered blocks are worth a store: those that were offered often enough.

    A block that is computed once and never again only drives out others. With a threshold of two or more, every offer
    is counted, once for each request and key. With no such threshold everything is admitted. *pool_threshold* and
    *tier_thresholds* are the offers from which on the pool, or a tier, takes a block. Past *max_keys* keys it forgets
    those that were not offered for longest.
    """

    def __init__(self, pool_threshold: int, tier_thresholds: Iterable[int], max_keys: int) -> None:
        self._pool_threshold = pool_threshold
        self._is_counting = max(pool_threshold, *tier_thresholds, 1) > 1
        self._max_keys = max_keys
        self._offers: OrderedDict[OffloadKey, int] = OrderedDict()

    def offer(self, keys: Sequence[OffloadKey], counted: set[OffloadKey]) -> Sequence[OffloadKey]:
        """Count an offer of each key of *keys* that is not in *counted*, the keys that this request offered before.

        Returns the keys counted, none where nothing is counted. Keys of the offer in hand are not forgotten for one
        another: those that find no room have no count.
        """
        if not self._is_counting:
            return ()
        offers = self._offers
        fresh = [key for key in dict.fromkeys(keys) if key not in counted]
        counted.update(fresh)
        new = [key for key in fresh if key not in offers]
        for key in fresh:
            if key in offers:
                offers[key] += 1
                offers.move_to_end(key)
        # All known keys of the offer are at the end now: whatever is in front of them may be forgotten.
        room = self._max_keys - (len(fresh) - len(new))
        del new[max(0, room) :]
        while len(offers) + len(new) > self._max_keys:
            offers.popitem(last=False)
        offers.update(dict.fromkeys(new, 1))
        return fresh

    def admitted_to_pool(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Those of *keys* that the pool takes, in order."""
        if self._pool_threshold <= 1:
            return keys
        return [key for key in keys if self.is_admitted(key, self._pool_threshold)]

    def is_admitted(self, key: OffloadKey, threshold: int) -> bool:
        """Whether *key* was offered as often as *threshold* asks for."""
        return threshold <= 1 or self._offers.get(key, 0) >= threshold

    def is_below(self, key: OffloadKey) -> bool:
        """Whether *key* was offered, but not often enough for the pool."""
        return 0 < self._offers.get(key, 0) < self._pool_threshold


class KeyMemory:
    """Remembers at least the last *limit* keys, in two generations of which the older is forgotten as a whole.

    One set operation a key. Forgetting is spread over later calls: none pays for what others remembered.
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

    def __contains__(self, key: OffloadKey) -> bool:
        """Whether *key* is remembered."""
        return key in self._young or key in self._old

    def clear(self) -> None:
        """Forget everything."""
        self._young, self._old, self._leaving = set(), set(), set()
