"""Values that come one behind the other, received together straight into their places.

Decides what the next call of a socket may receive, and where the bytes are no longer those expected. No I/O.
"""

from collections.abc import Sequence
from itertools import chain

_END = b"\r\n"


def head(value: memoryview) -> bytes:
    """What comes before a value of this size."""
    return b"$%d\r\n" % len(value)


class Frames:
    """Places for *values*, of which the first one's head has been read.

    Between two values come the end of one and the head of the next. They are received beside the values, and compared:
    a reply that is no value, or one of another size, ends it.
    """

    def __init__(self, values: Sequence[memoryview]) -> None:
        self._expected = [*(_END + head(value) for value in values[1:]), _END]
        gaps = [memoryview(bytearray(len(gap))) for gap in self._expected]
        self._parts = list(chain.from_iterable(zip(values, gaps, strict=True)))
        self._at = self._within = 0
        """The part that comes next, and how much of it has come."""
        self._behind = 0
        """Bytes that came behind a gap that is not as expected."""
        self.is_over = False
        """Whether all has come, or something else."""
        self._pass_whole()  # a value may be empty

    @property
    def is_in_value(self) -> bool:
        """Whether all of ``left`` is sure to come."""
        return self._at % 2 == 0

    def left(self) -> list[memoryview]:
        """Where the next bytes belong: the rest of a value and its end, else all that may come."""
        following = [self._parts[self._at + 1][: len(_END)]] if self.is_in_value else self._parts[self._at + 1 :]
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
        while count:
            part = self._parts[self._at]
            step = min(count, len(part) - self._within)
            self._within += step
            count -= step
            if not self.is_in_value:
                expected = self._expected[self._at // 2]
                if bytes(part[: self._within]) != expected[: self._within]:
                    self.is_over, self._behind = True, count
                    return
            self._pass_whole()

    def _pass_whole(self) -> None:
        while self._at < len(self._parts) and self._within == len(self._parts[self._at]):
            self._at, self._within = self._at + 1, 0
        self.is_over = self._at == len(self._parts)

    @property
    def filled(self) -> int:
        """How many values have come, each with its end."""
        is_ended = not self.is_in_value and bytes(self._parts[self._at][: self._within]).startswith(_END)
        return self._at // 2 + is_ended

    def surplus(self) -> bytes:
        """What came behind the last value, its end included; nothing if that was the end of all."""
        if self._at == len(self._parts):
            return b""
        surplus = [bytes(self._parts[self._at][: self._within])]
        for part in self._parts[self._at + 1 :]:
            surplus.append(bytes(part[: self._behind]))
            self._behind -= len(surplus[-1])
        return b"".join(surplus)
