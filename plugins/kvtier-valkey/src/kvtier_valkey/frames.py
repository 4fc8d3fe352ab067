"""Values that come one behind the other, received together straight into their places.

Decides what the next call of a socket may receive, and where the bytes are no longer those expected. No I/O.
"""

from collections.abc import Sequence
from itertools import chain

_END = b"\r\n"


def head_of(value: memoryview) -> bytes:
    """What comes before a value of this size."""
    return b"$%d\r\n" % len(value)


class Frames:
    r"""Places for *values*, each of which is the next reply, if it is there and of this size.

    ::

        $4096\r\n VALUE \r\n$4096\r\n VALUE ... \r\n

    What stands between the values is received beside them, and compared. The first bytes that differ end it.
    """

    def __init__(self, values: Sequence[memoryview]) -> None:
        heads = [head_of(value) for value in values]
        self._expected = [heads[0], *(_END + head for head in heads[1:]), _END]
        gaps = [memoryview(bytearray(len(gap))) for gap in self._expected]
        self._parts = [*chain.from_iterable(zip(gaps, values, strict=False)), gaps[-1]]
        self._at = self._within = 0
        """The part that comes next, and how much of it has come."""
        self._behind = 0
        """Bytes that came behind a gap that is not as expected."""
        self.is_over = False
        """Whether all has come, or something else."""
        self.is_broken = False
        """Whether a value did not end where it should have."""

    @property
    def is_in_value(self) -> bool:
        """Whether all of ``left`` is sure to come."""
        return self._at % 2 == 1

    def left(self) -> list[memoryview]:
        """Where the next bytes belong: the rest of a value and its end, else all that may come."""
        following = (
            [self._parts[self._at + 1][: len(_END)]] if self.is_in_value else self._parts[self._at + 1 :]
        )
        return [self._parts[self._at][self._within :], *following]

    def take(self, data: memoryview) -> int:
        """Put the beginning of *data* where it belongs. Returns how much that was."""
        taken = 0
        while taken < len(data) and not self.is_over:
            place = self._parts[self._at][self._within :]
            count = min(len(place), len(data) - taken)
            place[:count] = data[taken : taken + count]
            taken += count
            self.came(count)
        return taken

    def came(self, count: int) -> None:
        """So many bytes came where ``left`` said."""
        while count and not self.is_over:
            part = self._parts[self._at]
            step = min(count, len(part) - self._within)
            self._within += step
            count -= step
            if not self.is_in_value:
                self._compare(bytes(part[: self._within]), count)
            while not self.is_over and self._within == len(self._parts[self._at]):  # twice for an empty value
                self._at, self._within = self._at + 1, 0
                self.is_over = self._at == len(self._parts)

    def _compare(self, gap: bytes, behind: int) -> None:
        if gap != self._expected[self._at // 2][: self._within]:
            self.is_over, self._behind = True, behind
            self.is_broken = self._at > 0 and not gap.startswith(_END)

    @property
    def filled(self) -> int:
        """How many values have come, each with its end."""
        if self.is_in_value or not self._at:
            return self._at // 2
        return self._at // 2 - (not bytes(self._parts[self._at][: self._within]).startswith(_END))

    def surplus(self) -> bytes:
        """What came behind the last value that was filled and is no head of the next."""
        if self._at == len(self._parts):
            return b""
        surplus = [bytes(self._parts[self._at][len(_END) if self._at else 0 : self._within])]
        behind = self._behind
        for part in self._parts[self._at + 1 :]:
            surplus.append(bytes(part[:behind]))
            behind -= len(surplus[-1])
        return b"".join(surplus)
