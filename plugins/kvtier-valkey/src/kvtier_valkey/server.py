"""The server behind a tier: connections, each lent for one call, made and logged in when there is none.

Decides when a connection may be used again: only if every reply was read, and nothing else came.
"""

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from kvtier_valkey.connecting import connect, tls_context
from kvtier_valkey.faults import (
    ServerConfusedError,
    ServerLostError,
    ServerRefusedError,
    ServerSilentError,
)
from kvtier_valkey.location import Location, is_place
from kvtier_valkey.wire import SILENCE_S, Part, Wire, command

_T = TypeVar("_T")
Ending = tuple[bytes, Callable[[Wire], object]]
"""A command whose reply has another form than those before it, and how it is read."""
_KEYS_A_SCAN = b"1000"


class Server:
    """One server. Safe from any thread. Raises ``OSError`` alone (``faults``)."""

    def __init__(self, location: Location) -> None:
        """No I/O."""
        self._location = location
        self.address = location.address
        self._lock = threading.Lock()  # guards the three below
        self._idle: list[Wire] = []
        self._silences = 0
        """How often nobody answered. A connection from before the last time is not used again."""
        self._context: ssl.SSLContext | None = None

    def ask(
        self,
        commands: Sequence[Part],
        read: Callable[[Wire], Iterator[_T]],
        count: int,
        seconds: float,
        ending: Ending | None = None,
    ) -> list[_T | OSError]:
        """Send all *commands*, and *read* so many replies in order, within *seconds*.

        After a fault the replies that were not read are that fault; those before it count. If a reply is none, or the
        one of the *ending* is not where it should be, then all are that fault: one too many or too few shifts them.
        """
        answers: list[_T | OSError] = []
        try:
            with self._wire(seconds) as wire:
                wire.send(commands if ending is None else [*commands, ending[0]])
                for answer in read(wire):
                    answers.append(answer)  # noqa: PERF402 - those before a fault count
                if ending is not None:
                    ending[1](wire)
        except ServerConfusedError as error:
            answers = [error] * count
        except OSError as error:
            answers += [error] * (count - len(answers))
        return answers

    def ask_one(self, words: Sequence[bytes], read: Callable[[Wire], _T | OSError], seconds: float) -> _T:
        """Send one command, and read its reply within *seconds*. Raises a refusal."""
        (answer,) = self.ask([command(*words)], lambda wire: iter((read(wire),)), 1, seconds)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def remove_all(self, beginning: bytes, seconds: float) -> None:
        """Remove every key whose name has this *beginning*. Each request may take *seconds*.

        Cost: the server looks at the names of all its keys.
        """
        place = b"0"
        while True:
            scan = (b"SCAN", place, b"MATCH", _pattern(beginning), b"COUNT", _KEYS_A_SCAN)
            place, names = self.ask_one(scan, Wire.scanned, seconds)
            if names:
                self.ask_one((b"UNLINK", *names), Wire.number, seconds)
            if place == b"0":
                return

    def close(self) -> None:
        """Close the connections that are not lent. Twice is fine."""
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    @contextmanager
    def _wire(self, seconds: float) -> Iterator[Wire]:
        deadline = time.monotonic() + seconds
        with self._lock:
            silences = self._silences
        wire = self._take_idle() or self._connect(deadline)
        try:
            wire.begin(deadline)
            yield wire
        except BaseException as error:
            wire.close()
            if isinstance(error, ServerSilentError):
                self._doubt_idle()
            raise
        with self._lock:
            is_kept = wire.is_reusable and silences == self._silences
            if is_kept:
                self._idle.append(wire)
        if not is_kept:
            wire.close()

    def _doubt_idle(self) -> None:
        """The way may have been cut unseen: what lies idle would each cost a silence to find that out."""
        with self._lock:
            self._silences += 1
        self.close()

    def _take_idle(self) -> Wire | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                wire = self._idle.pop()
            if wire.is_quiet:
                return wire
            wire.close()

    def _connect(self, deadline: float) -> Wire:
        """A connection that is logged in. All of that together takes no longer than a silence may."""
        deadline = min(deadline, time.monotonic() + SILENCE_S)
        return self._open(self._primary(deadline) if self._location.sentinels else self._location, deadline)

    def _primary(self, deadline: float) -> Location:
        """Where the first sentinel that answers says the primary is. None of them takes more than its share of time."""
        location, failed = self._location, OSError("no sentinel")
        for number, sentinel in enumerate(location.sentinels):
            now = time.monotonic()
            share = now + (deadline - now) / (len(location.sentinels) - number + 1)
            try:
                found = self._ask_sentinel(sentinel, share)
            except OSError as error:
                failed = error
                continue
            return replace(location, host=found[0], port=int(found[1]), sentinels=())
        raise failed

    def _ask_sentinel(self, sentinel: Location, deadline: float) -> tuple[str, str]:
        wire = self._open(sentinel, deadline)
        try:
            wire.begin(deadline)
            wire.send([command(b"SENTINEL", b"get-master-addr-by-name", self._location.service.encode())])
            found = wire.pair()
        finally:
            wire.close()
        if isinstance(found, OSError):
            raise found
        if found is None:
            raise ServerRefusedError(
                f"{sentinel.address} knows no primary called {self._location.service!r}: correct the name in url"
            )
        host, port = (word.decode(errors="replace") for word in found)
        if not is_place(host, port):
            raise ServerRefusedError(
                f"{sentinel.address} says that {self._location.service!r} is at {host[:80]!r}, port {port[:80]!r}: no "
                "server can be there; see the sentinel's configuration"
            )
        return host, port

    def _open(self, location: Location, deadline: float) -> Wire:
        try:
            wire = Wire(connect(location, self._tls_context(), deadline), location.address, location.secrets)
        except (ServerSilentError, ServerRefusedError):
            raise
        except TimeoutError:
            raise ServerSilentError(f"{location.address} did not answer in time") from None
        except OSError as error:
            raise ServerLostError(f"{location.address}: {error}") from None
        try:
            wire.begin(deadline)
            _log_in(wire, location)
        except OSError:
            wire.close()
            raise
        return wire

    def _tls_context(self) -> ssl.SSLContext | None:
        if self._location.tls is None:
            return None
        with self._lock:
            if self._context is None:
                self._context = tls_context(self._location.tls)
            return self._context


def _log_in(wire: Wire, location: Location) -> None:
    steps: list[tuple[bytes, ...]] = []
    if location.password or location.username:
        login = (location.username, location.password) if location.username else (location.password,)
        steps.append((b"AUTH", *(word.encode() for word in login)))
    if location.database:
        steps.append((b"SELECT", b"%d" % location.database))
    wire.send([command(*words) for words in steps])
    for _ in steps:
        if (refused := wire.done()) is not None:
            raise refused


def _pattern(beginning: bytes) -> bytes:
    """Matches names with this *beginning*, whatever is in it."""
    return (
        b"".join(b"\\" + bytes([byte]) if byte in b"*?[]\\^-" else bytes([byte]) for byte in beginning) + b"*"
    )
