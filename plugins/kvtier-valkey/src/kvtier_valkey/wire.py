"""The protocol (RESP 2) on a link: commands out of memory, replies into memory, without a copy between.

Decides nothing about keys. Raises ``OSError`` where a reply is not one: the connection is of no use then, because every
later reply could be that of an earlier command.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from kvtier_valkey.faults import ServerLostError, ServerRefusedError, ServerSilentError, refusal
from kvtier_valkey.link import Link, seconds_to

SILENCE_S = 5.0
"""A server that neither sends nor takes a byte for so long is taken for dead."""
_LINE = 4096
"""Bytes of the longest line: of a reply that is a status, a number, a length or an error."""
_MOST_BYTES = 1 << 20
"""Of a text or a name."""
_MOST_NAMES = 1 << 20
_END = b"\r\n"
_TLS_ALERT = b"\x15\x03"

Part = bytes | memoryview


def command(*words: bytes) -> bytes:
    """A command, whole."""
    return b"".join([b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)])


def set_command(name: bytes, size: int, options: int) -> bytes:
    """The beginning of ``SET name VALUE`` with so many words behind it, up to the *size* bytes of its value."""
    return b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + options, len(name), name, size)


class Wire:
    """A connection that speaks the protocol. For one thread at a time; ``begin`` comes before each call's first use."""

    def __init__(self, link: Link, address: str) -> None:
        self._link = link
        self._address = address
        self._buffer = bytearray(_LINE)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0  # what has been received and not read yet
        self._is_refused = False
        self._deadline = 0.0
        self._longest = 0.0
        """Seconds that a call of the link may wait."""
        self._unsent = 0
        """Bytes that the server's machine had not taken when somebody last looked."""

    def begin(self, deadline: float) -> None:
        """What follows has to be over by *deadline*, on the monotonic clock."""
        self._deadline = deadline
        self._longest = min(SILENCE_S, deadline - time.monotonic())

    @property
    def is_reusable(self) -> bool:
        """Whether nothing came unasked, and nothing was refused that another connection may be granted."""
        return self._is_read and not self._is_refused

    @property
    def is_quiet(self) -> bool:
        """Whether the connection is open, and nothing has come on it."""
        return self._link.is_quiet

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    @property
    def _is_read(self) -> bool:
        return self._begin == self._end

    def send(self, parts: Sequence[Part]) -> None:
        """Send all of *parts*. Raises ``OSError``."""
        views = [memoryview(part) for part in parts]
        first = 0
        while first < len(views):
            sent = self._moved(partial(self._link.send, views[first:]))
            self._unsent = self._link.unsent
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]

    def done(self) -> OSError | None:
        """Read a reply that is OK, or a refusal."""
        line = self._line()
        return None if line == b"+OK" else self._refused(line)

    def number(self) -> int | OSError:
        """Read a reply that is a number, or a refusal."""
        line = self._line()
        return self._digits(line) if line[:1] == b":" else self._refused(line)

    def fill(self, into: memoryview) -> bool | OSError:
        """Read a reply that is a value: True where it fills *into*, False where it is absent or of another size."""
        line = self._line()
        if line == b"$-1":
            return False
        if line[:1] != b"$":
            return self._refused(line)
        size = self._digits(line)
        fits = size == len(into)
        if fits:
            self._read(into)
        else:
            self._skip(size)
        self._end_of_value()
        return fits

    def text(self) -> bytes | OSError:
        """Read a reply that is a short value, or a refusal."""
        line = self._line()
        return self._value(line) if line[:1] == b"$" else self._refused(line)

    def pair(self) -> tuple[bytes, bytes] | OSError | None:
        """Read a reply that is two short values, or none; or a refusal."""
        line = self._line()
        if line == b"*-1":
            return None
        return (
            (self._value(self._line()), self._value(self._line())) if line == b"*2" else self._refused(line)
        )

    def scanned(self) -> tuple[bytes, list[bytes]] | OSError:
        """Read a reply to SCAN: where to go on, and names; or a refusal."""
        line = self._line()
        if line != b"*2":
            return self._refused(line)
        place = self._value(self._line())
        line = self._line()
        count = self._digits(line)
        if line[:1] != b"*" or count > _MOST_NAMES:
            raise ServerLostError(f"{self._address} sent no list of names: {line[:40]!r}")
        return place, [self._value(self._line()) for _ in range(count)]

    def _value(self, line: bytes) -> bytes:
        size = self._digits(line)
        if line[:1] != b"$" or size > _MOST_BYTES:
            raise ServerLostError(f"{self._address} sent no short value: {line[:40]!r}")
        value = bytearray(size)
        self._read(memoryview(value))
        self._end_of_value()
        return bytes(value)

    def _end_of_value(self) -> None:
        if self._line():
            raise ServerLostError(f"{self._address} sent a value that is longer than it said")

    def _refused(self, line: bytes) -> OSError:
        if line[:1] != b"-":
            raise ServerLostError(f"{self._address} sent a reply that answers no question: {line[:40]!r}")
        error = refusal(self._address, line[1:].decode(errors="replace"))
        self._is_refused = self._is_refused or isinstance(error, ServerLostError)
        return error

    def _digits(self, line: bytes) -> int:
        digits = line[1:]
        if not digits.isdigit() or len(digits) > 18:  # noqa: PLR2004 - what fits into 64 bits
            raise ServerLostError(f"{self._address} sent no number: {line[:40]!r}")
        return int(digits)

    def _line(self) -> bytes:
        while (end := self._buffer.find(_END, self._begin, self._end)) < 0:
            self._receive_more()
        line = bytes(self._view[self._begin : end])
        self._begin = end + len(_END)
        return line

    def _read(self, into: memoryview) -> None:
        done = min(len(into), self._end - self._begin)
        into[:done] = self._view[self._begin : self._begin + done]
        self._begin += done
        while done < len(into):
            done += self._receive(into[done:], whole=True)

    def _skip(self, count: int) -> None:
        while count:
            if self._is_read:
                self._receive_more()
            passed = min(count, self._end - self._begin)
            self._begin += passed
            count -= passed

    def _receive_more(self) -> None:
        left = self._end - self._begin
        self._view[:left] = bytes(self._view[self._begin : self._end])
        self._begin, self._end = 0, left
        if left == _LINE:
            raise ServerLostError(f"{self._address} sent a line without an end")
        self._end += self._receive(self._view[left:], whole=False)

    def _receive(self, into: memoryview, *, whole: bool) -> int:
        count = self._moved(partial(self._link.receive, into, whole=whole))
        if not count:
            if self._buffer[self._begin : self._end].startswith(_TLS_ALERT):
                raise ServerRefusedError(f"{self._address} speaks TLS: begin url with rediss://")
            raise ServerLostError(f"{self._address} closed the connection")
        return count

    def _moved(self, call: Callable[[], int]) -> int:
        """Make a call of the link, again as long as the server goes on taking what was sent before."""
        while True:
            try:
                left = seconds_to(self._deadline)
                self._longest = min(self._longest, left)
                self._link.limit(self._longest)
                return call()
            except TimeoutError:
                before, self._unsent = self._unsent, self._link.unsent
                if self._unsent >= before or time.monotonic() >= self._deadline:
                    raise ServerSilentError(f"{self._address} did not answer in time") from None
            except OSError as error:
                raise ServerLostError(f"{self._address}: {error}") from None
