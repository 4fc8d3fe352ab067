"""A connection to a server: made within a deadline, encrypted where it is to be, and waited for in the kernel.

Decides nothing about what is sent. Raises ``TimeoutError`` where nothing moved for as long as it may, else ``OSError``.
"""

import fcntl
import select
import socket
import ssl
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier_valkey.faults import ServerRefusedError, ServerSilentError
from kvtier_valkey.location import Location

_PARTS = 512
"""Pieces of memory that one system call moves, below the kernel's 1,024."""


class Link:
    """A connected socket. For one thread at a time."""

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
        """Send a beginning of *parts*. How many bytes that was."""
        try:
            return self._sock.sendmsg(parts[:_PARTS])
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

    _sock: ssl.SSLSocket

    def _set_limit(self, seconds: float) -> None:
        self._sock.settimeout(seconds)

    def send(self, parts: Sequence[memoryview]) -> int:
        """As ``Link.send``, one part at most."""
        return self._sock.send(parts[0])

    def receive(self, parts: Sequence[memoryview], *, whole: bool) -> int:  # noqa: ARG002 - as far as it has come
        """As ``Link.receive``; what is there, of one part at most."""
        return self._sock.recv_into(parts[0])

    @property
    def is_quiet(self) -> bool:
        """As ``Link.is_quiet``."""
        return not self._sock.pending() and super().is_quiet


def connect(location: Location, context: ssl.SSLContext | None, deadline: float) -> Link:
    """Connect to a server, with TLS if there is a *context*. *deadline* is on the monotonic clock.

    Looking a name up is the operating system's affair, which has its own limits.
    """
    if location.path:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return Link(_connected(sock, location.path, deadline))
    failed: OSError = OSError("its name has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(
        location.host, location.port, type=socket.SOCK_STREAM
    ):
        try:
            sock = _connected(socket.socket(family, kind, protocol), place, deadline)
        except OSError as error:
            failed = error
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Link(sock) if context is None else _encrypted(sock, location, context, deadline)
    raise failed


def _connected(sock: socket.socket, place: str | tuple[Any, ...], deadline: float) -> socket.socket:
    try:
        sock.settimeout(seconds_to(deadline))
        sock.connect(place)
    except BaseException:
        sock.close()
        raise
    return sock


def _encrypted(sock: socket.socket, location: Location, context: ssl.SSLContext, deadline: float) -> TlsLink:
    try:
        sock.settimeout(seconds_to(deadline))
        return TlsLink(context.wrap_socket(sock, server_hostname=location.host))
    except TimeoutError:
        sock.close()
        raise ServerSilentError(
            f"{location.address} did not answer the beginning of TLS in time; if it speaks no TLS, begin url with "
            "redis://"
        ) from None
    except ssl.SSLError as error:
        sock.close()
        raise ServerRefusedError(
            f"{location.address}: {error}; check that the server speaks TLS at this port, and the ssl_ options of url"
        ) from None
    except BaseException:
        sock.close()
        raise


def tls_context(options: Mapping[str, str]) -> ssl.SSLContext:
    """How to encrypt, by the ``ssl_`` *options*; reads their files. Raises ``ServerRefusedError``."""
    try:
        context = ssl.create_default_context()
        required = options.get("ssl_cert_reqs", "required")
        context.check_hostname = required != "none" and options.get("ssl_check_hostname") != "false"
        context.verify_mode = getattr(ssl, f"CERT_{required.upper()}")
        if certificate := options.get("ssl_certfile"):
            # A password, if an empty one: else OpenSSL would ask for it on the terminal.
            context.load_cert_chain(certificate, options.get("ssl_keyfile"), options.get("ssl_password", ""))
        trusted = options.get("ssl_ca_certs"), options.get("ssl_ca_path")
        if any(trusted):
            context.load_verify_locations(*trusted)
    except (OSError, ValueError) as error:
        raise ServerRefusedError(
            f"TLS can't be spoken as url says: {error}; check its ssl_ options"
        ) from None
    return context


def seconds_to(deadline: float) -> float:
    """How long it is until then. Raises ``TimeoutError`` when that is over."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds
