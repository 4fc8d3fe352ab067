"""Admission decides which offered blocks are worth a store: those that were offered often enough (contract C15).

A block that is computed once and never again only drives out others. With a threshold of two or more, of the pool or
of a tier, every offer is counted, once for each request and key, in a bounded memory that forgets what was not offered
for longest. With no such threshold nothing is counted and everything is admitted.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvtier_core.keys import OffloadKey


class Admission:
    """How often keys were offered, and what that means for a store.

    *pool_threshold* and *tier_thresholds* are the offers from which on the pool, or a tier, takes a block; at most
    *max_keys* keys are counted.
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
