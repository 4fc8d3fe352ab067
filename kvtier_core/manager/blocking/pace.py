"""Decides how many keys one call of ``contains`` asks about: as many as take hardly longer than a few. Pure.

A storage that asks for one key after the other gets few, so that what it has told is known early and little is asked
in vain. One that asks for many together, or answers from memory, gets many.
"""

_FIRST = 4
_MOST = 256
_QUICK_S = 0.05
"""Calls this quick are never made smaller."""
_HARDLY = 1.5
"""How much longer than the quickest call is hardly longer, as a factor."""


class Pace:
    """Learns from the calls of one tier. Its owner holds a lock around every method."""

    def __init__(self) -> None:
        self.keys = _FIRST
        """How many keys the next call is to ask about."""
        self._quickest_s = float("inf")

    def at(self, waiting: int) -> int:  # noqa: ARG002 - as ``Limit.at``
        """How many keys one call may take, however many wait."""
        return self.keys

    def note(self, keys: int, seconds: float) -> None:
        """A call that asked about *keys* took *seconds*.

        Example: 10 ms a key, one after the other, makes calls of 4 or 8 keys; 200 ms for up to 32 keys together makes
        calls of 32 or 64.
        """
        # A single key takes what the storage takes: from there it can only get slower by asking for more.
        self._quickest_s = seconds if keys == 1 else min(self._quickest_s, seconds)
        if seconds > max(_QUICK_S, _HARDLY * self._quickest_s):
            self.keys = max(1, min(self.keys, keys) // 2)
        elif keys >= self.keys:
            self.keys = min(_MOST, 2 * self.keys)
