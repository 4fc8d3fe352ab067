"""Which blocks of a shared tier gave wrong bytes here, and which of them may be deleted for all (contract C37).

One node's bad path must not empty the store of all. So a block that gave wrong bytes is not served by this process
first; then it is read again; and only what is wrong again is deleted, a few in a row. Pure: no lock, no I/O.
"""

from collections import OrderedDict

from kvtier_core.keys import OffloadKey

_MOST_IN_A_ROW = 3
"""Deletions without one block that was right when it was read again: past it the path is the likelier culprit."""


class Doubts:
    """The doubtful blocks of one tier instance, at most *limit* of them; the oldest is forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: OrderedDict[OffloadKey, None] = OrderedDict()
        self._in_a_row = 0

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, key: OffloadKey) -> None:
        """The block gave wrong bytes."""
        self._keys[key] = None
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def remove(self, key: OffloadKey) -> None:
        """The block is gone, or was stored anew."""
        self._keys.pop(key, None)

    def was_right(self, key: OffloadKey) -> None:
        """The block was read again, and was right."""
        self.remove(key)
        self._in_a_row = 0

    def was_wrong(self) -> bool:
        """A block was read again, and was wrong again. Whether to delete it."""
        self._in_a_row += 1
        return self._in_a_row <= _MOST_IN_A_ROW
