"""A connection to a server, waited for in the kernel.

Decides nothing about what is sent. Raises ``TimeoutError`` where nothing moved for as long as it may, else ``OSError``.
"""

import fcntl
import select
import socket
import ssl
import struct
import termios
import time
from collections.abc import Sequence

_PARTS = 512
"""Pieces of memory that one system call moves, below the kernel's 1,024."""
_ENCRYPTED_BYTES = 64 << 10
"""Encrypted together. TLS tells nothing until all are sent: a server that takes fewer within a silence seems dead."""


class Link:
    """A connected socket. For one thread at a time."""

    most_parts = _PARTS
    """How many parts one call sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._seconds = 0.0
        sock.settimeout(None)  # the kernel waits: a call may then take until all bytes are there

    def limit(self, seconds: float) -> None:
        """No later call waits longer than *seconds* without a byte."""
        if seconds != self._seconds:  # setting it takes two system calls
            self._seconds = seconds
            self._set_limit(seconds)

    def _set_limit(self, seconds: float) -> None:
        whole = int(seconds)
        limit = struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self, parts: Sequence[memoryview]) -> int:
        """Send a beginning of *parts*, ``most_parts`` of them at most. How many bytes that was."""
        try:
            return self._sock.sendmsg(parts)
        except BlockingIOError:
            raise TimeoutError from None

    def receive(self, parts: Sequence[memoryview], *, whole: bool) -> int:
        """Receive into a beginning of *parts*: what is there, or *whole* unless that takes too long. 0 at the end."""
        try:
            return self._sock.recvmsg_into(parts[:_PARTS], 0, socket.MSG_WAITALL if whole else 0)[0]
        except BlockingIOError:
            raise TimeoutError from None

    @property
    def unsent(self) -> int:
        """Bytes sent that the server's machine has not taken yet."""
        (count,) = struct.unpack("i", fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, bytes(4)))
        return int(count)

    @property
    def is_quiet(self) -> bool:
        """Whether the connection is open, and nothing has come on it."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close it."""
        self._sock.close()


class TlsLink(Link):
    """A link whose bytes are encrypted. The kernel can't wait for whole ones."""

    most_parts = 1
    _sock: ssl.SSLSocket

    def _set_limit(self, seconds: float) -> None:
        self._sock.settimeout(seconds)

    def send(self, parts: Sequence[memoryview]) -> int:
        """As ``Link.send``. Of a long part a little: a call waits until all that it encrypted has been sent."""
        return self._sock.send(parts[0][:_ENCRYPTED_BYTES])

    def receive(self, parts: Sequence[memoryview], *, whole: bool) -> int:  # noqa: ARG002 - as far as it has come
        """As ``Link.receive``; what is there, of one part at most."""
        return self._sock.recv_into(parts[0])

    @property
    def is_quiet(self) -> bool:
        """As ``Link.is_quiet``."""
        return not self._sock.pending() and super().is_quiet


def seconds_to(deadline: float) -> float:
    """How long it is until then. Raises ``TimeoutError`` when that is over."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds
