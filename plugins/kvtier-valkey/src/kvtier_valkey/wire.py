"""The protocol (RESP 2) on a link: commands out of memory, replies into memory, without a copy between.

Decides nothing about keys. Raises ``OSError`` where a reply is not one: the connection is of no use then, because every
later reply could be that of an earlier command.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import TypeVar

from kvtier_valkey.faults import (
    ServerConfusedError,
    ServerLostError,
    ServerRefusedError,
    ServerSilentError,
    masked,
    refusal,
)
from kvtier_valkey.frames import Frames, head_of
from kvtier_valkey.link import Link, seconds_to

_T = TypeVar("_T")
_U = TypeVar("_U")

SILENCE_S = 5.0
"""A server that neither sends nor takes a byte for so long is taken for dead."""
_LINE = 4096
"""Bytes of the longest line: of a reply that is a status, a number, a length or an error."""
_MOST_BYTES = 1 << 20
"""Of a text or a name."""
_MOST_NAMES = 1 << 20
_MOST_BYTES_OF_NAMES = 64 << 20
"""Of all names of a reply."""
MOST_VALUE = 512 << 20
"""Bytes of the largest value that a server takes, unless it is told otherwise."""
_TOGETHER = 64
"""Values received together: enough that what a call costs is nothing beside them."""
_END = b"\r\n"
_TLS_ALERT = b"\x15\x03"

Part = bytes | memoryview


def command(*words: bytes) -> bytes:
    """A command, whole."""
    return b"".join([b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)])


def of_each(word: bytes, names: Sequence[bytes]) -> bytes:
    """For each of *names* the command that has it as its one argument."""
    begin = b"*2\r\n$%d\r\n%b\r\n" % (len(word), word)
    return b"".join([b"%b$%d\r\n%b\r\n" % (begin, len(name), name) for name in names])


def set_command(name: bytes, size: int, options: int) -> bytes:
    """The beginning of ``SET name VALUE`` with so many words behind it, up to the *size* bytes of its value."""
    return b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + options, len(name), name, size)


class Wire:
    """A connection that speaks the protocol. For one thread at a time; ``begin`` comes before each call's first use."""

    def __init__(self, link: Link, address: str, secrets: Collection[str] = ()) -> None:
        """*secrets* are shown by no message, whatever the server sends."""
        self._link = link
        self._address = address
        self._secrets = secrets
        self._buffer = bytearray(_LINE)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0  # in the buffer: what has been received and not read yet
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
            sent = self._moved(partial(self._link.send, views[first : first + self._link.most_parts]))
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

    def all_done(self, count: int) -> Iterator[OSError | None]:
        """As ``done``, so many times."""
        return self._mostly(b"+OK\r\n", None, self.done, count)

    def numbers(self, count: int, usual: int) -> Iterator[int | OSError]:
        """As ``number``, so many times; fast where most are the *usual* one."""
        return self._mostly(b":%d\r\n" % usual, usual, self.number, count)

    def _mostly(self, usual: bytes, meaning: _T, read: Callable[[], _U], count: int) -> Iterator[_T | _U]:
        """*count* replies, one by one but for those that are *usual* and came together."""
        while count:
            come = min(count, (self._end - self._begin) // len(usual))
            if come and self._buffer.startswith(usual * come, self._begin):
                self._begin += come * len(usual)
                yield from repeat(meaning, come)
            else:
                come = 1
                yield read()
            count -= come

    def fill(self, intos: Sequence[memoryview]) -> Iterator[bool | OSError]:
        """Read replies that are values: True for one that fills its place, False if it is absent or of another size.

        A place that is not filled may have other bytes than before.
        """
        filled = 0
        while filled < len(intos):
            if self._may_fit(intos[filled]):
                frames = Frames(intos[filled : filled + _TOGETHER])
                yield from self._fill(frames)
                filled += frames.filled
            else:
                filled += 1
                yield self._no_fit()

    def _may_fit(self, into: memoryview) -> bool:
        """Whether what has come of the next reply agrees with the head of a value of this size."""
        head = head_of(into)
        return head.startswith(self._buffer[self._begin : min(self._end, self._begin + len(head))])

    def _fill(self, frames: Frames) -> Iterator[bool]:
        """Receive values as long as they fit; one call receives all of them that have come."""
        self._begin += frames.take(self._view[self._begin : self._end])
        told = 0
        while True:
            yield from repeat(True, frames.filled - told)
            told = frames.filled
            if frames.is_over:
                break
            frames.came(self._receive(frames.left(), whole=frames.is_in_value))
        if frames.is_broken:
            raise self._too_long()
        if surplus := frames.surplus():
            self._keep(surplus + self._view[self._begin : self._end])

    def _no_fit(self) -> bool | OSError:
        """Read a reply that is no value, or one of another size, or a refusal."""
        line = self._line()
        if line[:1] != b"$":
            return self._refused(line)
        if line != b"$-1":
            size = self._digits(line)
            if size > MOST_VALUE:
                raise ServerConfusedError(
                    f"{self._address} sent a value of impossible size: {self._shown(line)}"
                )
            self._skip(size)
            self._end_of_value()
        return False

    def nothing(self) -> OSError | None:
        """Read a reply that is no value, or a refusal."""
        line = self._line()
        return None if line == b"$-1" else self._refused(line)

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
            raise ServerConfusedError(f"{self._address} sent no list of names: {self._shown(line)}")
        names: list[bytes] = []
        room = _MOST_BYTES_OF_NAMES
        for _ in range(count):
            names.append(self._value(self._line()))
            room -= len(names[-1])
            if room < 0:
                raise ServerConfusedError(f"{self._address} sent names without end")
        return place, names

    def _value(self, line: bytes) -> bytes:
        size = self._digits(line)
        if line[:1] != b"$" or size > _MOST_BYTES:
            raise ServerConfusedError(f"{self._address} sent no short value: {self._shown(line)}")
        value = bytearray(size)
        self._read(memoryview(value))
        self._end_of_value()
        return bytes(value)

    def _end_of_value(self) -> None:
        if self._line():
            raise self._too_long()

    def _too_long(self) -> OSError:
        return ServerConfusedError(f"{self._address} sent a value that is longer than it said")

    def _refused(self, line: bytes) -> OSError:
        if line[:1] != b"-":
            raise ServerConfusedError(
                f"{self._address} sent a reply that answers no question: {self._shown(line)}"
            )
        error = refusal(self._address, line[1:].decode(errors="replace"), self._secrets)
        self._is_refused = self._is_refused or isinstance(error, ServerLostError)
        return error

    def _shown(self, line: bytes) -> str:
        """The beginning of *line* as a message may have it. A secret that was cut could not be found any more."""
        return repr(masked(line, self._secrets)[:40])

    def _digits(self, line: bytes) -> int:
        digits = line[1:]
        if not digits.isdigit() or len(digits) > 18:  # noqa: PLR2004 - what fits into 64 bits
            raise ServerConfusedError(f"{self._address} sent no number: {self._shown(line)}")
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
            done += self._receive([into[done:]], whole=True)

    def _skip(self, count: int) -> None:
        while count:
            if self._is_read:
                self._receive_more()
            passed = min(count, self._end - self._begin)
            self._begin += passed
            count -= passed

    def _receive_more(self) -> None:
        left = bytes(self._view[self._begin : self._end])
        if len(left) >= _LINE:
            raise ServerConfusedError(f"{self._address} sent a line without an end")
        self._keep(left)
        self._end += self._receive([self._view[len(left) :]], whole=False)

    def _keep(self, data: bytes) -> None:
        """These bytes have been received and not been read yet."""
        size = max(_LINE, len(data))
        if size != len(self._buffer):
            self._buffer = bytearray(size)
            self._view = memoryview(self._buffer)
        self._view[: len(data)] = data
        self._begin, self._end = 0, len(data)

    def _receive(self, into: Sequence[memoryview], *, whole: bool) -> int:
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
