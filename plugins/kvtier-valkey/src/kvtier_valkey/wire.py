"""The protocol (RESP 2) on a connected socket: commands out of memory, replies into memory, without a copy between.

Decides nothing about keys or faults of the server. Raises ``OSError`` where a reply is not one: the connection is of no
use then, because every later reply could be that of an earlier command.
"""

import ssl
import time
from collections.abc import Sequence
from socket import socket

from kvtier_valkey.faults import ServerLostError, refusal

SILENCE_S = 5.0
"""A server that neither sends nor takes a byte for so long is taken for dead."""
_LINE = 4096
"""Bytes of the longest line: of a reply that is a status, a number, a length or an error."""
_PARTS = 512
"""Pieces of memory that one system call sends, below the kernel's 1,024."""
_END = b"\r\n"

Part = bytes | memoryview


def command(*words: bytes) -> bytes:
    """A command, whole."""
    return b"".join([b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)])


def set_command(name: bytes, size: int, options: int) -> bytes:
    """The beginning of ``SET name VALUE`` with so many words behind it, up to the *size* bytes of its value."""
    return b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + options, len(name), name, size)


class Wire:
    """A connection during one call. For one thread."""

    def __init__(self, sock: socket, address: str, deadline: float) -> None:
        """*deadline* is on the monotonic clock."""
        self._sock = sock
        self._address = address
        self._deadline = deadline
        self._buffer = bytearray(_LINE)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0  # what has been received and not read yet
        self._is_refused = False
        self._longest = float("inf")
        """Seconds that a call of the socket may take."""

    @property
    def is_reusable(self) -> bool:
        """Whether nothing came unasked, and nothing was refused that another connection may be granted."""
        return self._is_read and not self._is_refused

    @property
    def _is_read(self) -> bool:
        return self._begin == self._end

    def send(self, parts: Sequence[Part]) -> None:
        """Send all of *parts*. Raises ``OSError``."""
        if isinstance(self._sock, ssl.SSLSocket):  # which gathers nothing
            for part in parts:
                self._wait()
                self._sock.sendall(part)
            return
        views = [memoryview(part) for part in parts]
        first = 0
        while first < len(views):
            self._wait()
            sent = self._sock.sendmsg(views[first : first + _PARTS])
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
        if self._line():
            raise ServerLostError(f"{self._address} sent a value that is longer than it said")
        return fits

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
            done += self._receive(into[done:])

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
        self._end += self._receive(self._view[left:])

    def _receive(self, into: memoryview) -> int:
        self._wait()
        count = self._sock.recv_into(into)
        if not count:
            raise ServerLostError(f"{self._address} closed the connection")
        return count

    def _wait(self) -> None:
        """Let the next call of the socket take as long as it may."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        longest = min(left, SILENCE_S)
        if longest < self._longest:  # setting it is a system call
            self._sock.settimeout(longest)
            self._longest = longest
