"""The server behind a tier: connections of the client library, lent for one call each.

Decides when a connection may be used again: only if every reply was read, and nothing else came. The library connects,
encrypts and logs in, and looks whether a connection that is used again is still open.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import valkey

from kvtier_valkey.faults import fault_of
from kvtier_valkey.settings import ValkeySettings
from kvtier_valkey.wire import SILENCE_S, Part, Wire

_T = TypeVar("_T")
_KEYS_A_SCAN = 1000


class Server:
    """One server. Safe from any thread, and in a forked child. Raises ``OSError`` alone (``faults``)."""

    def __init__(self, settings: ValkeySettings) -> None:
        """No I/O. Raises ``ValueError`` for a URL that the client can't read."""
        self._pool = valkey.ConnectionPool.from_url(settings.url)
        options: dict[str, Any] = self._pool.connection_kwargs
        options |= {"socket_timeout": SILENCE_S, "socket_connect_timeout": SILENCE_S}
        for name in ("username", "password"):
            if (secret := getattr(settings, name)) is not None:
                options[name] = secret.get_secret_value()
        if self._pool.connection_class is valkey.SSLConnection and options.get("ssl_cert_reqs") != "none":
            options.setdefault("ssl_check_hostname", True)
        self._secrets = {str(options[name]) for name in ("password", "ssl_password") if options.get(name)}
        self._client = valkey.Valkey(connection_pool=self._pool)
        is_socket = urlsplit(settings.url).scheme.lower() == "unix"
        self.address = (
            str(options.get("path"))
            if is_socket
            else f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        )

    def ask(
        self, commands: Sequence[Part], replies: Sequence[Callable[[Wire], _T]], seconds: float
    ) -> list[_T | OSError]:
        """Send all *commands*, and read the *replies* in order, within *seconds*.

        After a fault the replies that were not read are that fault; those before it count.
        """
        answers: list[_T | OSError] = []
        try:
            with self._wire(seconds) as wire:
                wire.send(commands)
                for read in replies:
                    answers.append(read(wire))  # noqa: PERF401 - those before a fault count
        except OSError as error:
            answers += [error] * (len(replies) - len(answers))
        return answers

    def info(self) -> Mapping[str, Any]:
        """What the server says about itself."""
        found: Mapping[str, Any] = self._called(self._client.info)
        return found

    def remove_all(self, beginning: bytes) -> None:
        """Remove every key whose name has this *beginning*. Cost: the server looks at the names of all its keys."""

        def remove() -> None:
            names: list[bytes] = []
            for name in self._client.scan_iter(match=_pattern(beginning), count=_KEYS_A_SCAN):
                names.append(name)
                if len(names) == _KEYS_A_SCAN:
                    self._client.unlink(*names)
                    names.clear()
            if names:
                self._client.unlink(*names)

        self._called(remove)

    def close(self) -> None:
        """Close all connections. Twice is fine."""
        self._pool.disconnect()

    def _called(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - a hostile answer raises other than the library's own
            raise fault_of(self.address, error, self._secrets) from None

    @contextmanager
    def _wire(self, seconds: float) -> Iterator[Wire]:
        deadline = time.monotonic() + seconds
        connection = self._called(lambda: self._pool.get_connection("GET"))
        try:
            wire = Wire(connection._sock, self.address, deadline)  # noqa: SLF001 - the library offers no other way to it
            yield wire
            if not wire.is_reusable:
                connection.disconnect()
        except BaseException as error:
            connection.disconnect()
            if isinstance(error, OSError):
                raise fault_of(self.address, error) from None
            raise
        finally:
            self._pool.release(connection)


def _pattern(beginning: bytes) -> bytes:
    """Matches names with this *beginning*, whatever is in it."""
    return (
        b"".join(b"\\" + bytes([byte]) if byte in b"*?[]\\^-" else bytes([byte]) for byte in beginning) + b"*"
    )
