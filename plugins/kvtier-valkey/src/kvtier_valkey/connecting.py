"""How a connection to a server is made: within a deadline, and encrypted where it is to be.

Decides how to encrypt, and what it means that a server does not. Raises ``OSError``.
"""

import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any

from kvtier_valkey.faults import ServerRefusedError, ServerSilentError, tls_refusal
from kvtier_valkey.link import Link, TlsLink, seconds_to
from kvtier_valkey.location import Location

_IDLE_S = 60
"""After so long without a word the kernel asks whether the other side is there, so that no firewall forgets it."""
_TLS_PATIENCE_S = 1.0
"""A server that speaks TLS has begun to answer by then, on a line that is of use for blocks."""


def connect(location: Location, context: ssl.SSLContext | None, deadline: float) -> Link:
    """Connect to a server, with TLS if there is a *context*. *deadline* is on the monotonic clock.

    No address of its name takes more than its share of the time. Looking the name up is the operating system's affair,
    which has its own limits; it can't be ended before.
    """
    if location.path:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return Link(_connected(sock, location.path, deadline))
    failed: OSError = OSError("its name has no address")
    addresses = socket.getaddrinfo(location.host, location.port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, place) in enumerate(addresses):
        now = time.monotonic()
        share = now + (deadline - now) / (len(addresses) - number)
        try:
            sock = _connected(socket.socket(family, kind, protocol), place, share)
        except OSError as error:
            failed = error
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        return Link(sock) if context is None else _encrypted(sock, place, location, context, deadline)
    raise failed


def _connected(sock: socket.socket, place: str | tuple[Any, ...], deadline: float) -> socket.socket:
    try:
        sock.settimeout(seconds_to(deadline))
        sock.connect(place)
    except BaseException:
        sock.close()
        raise
    return sock


def _encrypted(
    sock: socket.socket, place: tuple[Any, ...], location: Location, context: ssl.SSLContext, deadline: float
) -> TlsLink:
    try:
        sock = context.wrap_socket(sock, server_hostname=location.host, do_handshake_on_connect=False)
        _shake_hands(sock, place, location.address, deadline)
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise ServerSilentError(
                f"{location.address} did not answer the beginning of TLS in time"
            ) from None
        if isinstance(error, ssl.SSLError):
            raise tls_refusal(location.address, error) from None
        raise
    return TlsLink(sock)


def _shake_hands(tls: ssl.SSLSocket, place: tuple[Any, ...], address: str, deadline: float) -> None:
    """Begin TLS. A server without it waits for the rest of a command: after a while it is asked in the other way."""
    try:
        tls.settimeout(min(_TLS_PATIENCE_S, seconds_to(deadline)))
        tls.do_handshake()
    except TimeoutError:
        if _speaks_plainly(tls.family, place, deadline):
            raise ServerRefusedError(f"{address} speaks no TLS: begin url with redis://") from None
        tls.settimeout(seconds_to(deadline))
        tls.do_handshake()


def _speaks_plainly(family: int, place: tuple[Any, ...], deadline: float) -> bool:
    """Whether a server answers a command that is not encrypted. Whatever it answers shows that it does."""
    try:
        deadline = min(deadline, time.monotonic() + _TLS_PATIENCE_S)
        with _connected(socket.socket(family, socket.SOCK_STREAM), place, deadline) as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(1) in (b"+", b"-")
    except OSError:
        return False


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
