"""The tier a configuration names ``valkey``: what its keys are called, what a reply means for a block.

::

    <prefix>:<namespace>             what the namespace stands for
    <prefix>:<namespace>:<key>       a block

Connections are ``Server``'s, the protocol ``Wire``'s. What leaves a full server, and when, is the server's affair.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvtier_core import TierOpenError
from kvtier_core.tier import BlockTier, OffloadKey, TierContext, TierInfo
from kvtier_valkey.faults import (
    NotABlockError,
    ServerBusyError,
    ServerConfusedError,
    ServerFullError,
    ServerRefusedError,
)
from kvtier_valkey.server import Ending, Server
from kvtier_valkey.settings import ValkeySettings
from kvtier_valkey.suitability import read_info, risk_of, why_not
from kvtier_valkey.wire import MOST_VALUE, SILENCE_S, Part, Wire, command, of_each, set_command

_T = TypeVar("_T")


class ValkeyTier(BlockTier):
    """Blocks as values of a server that others use too, and that decides itself how many it keeps."""

    Settings = ValkeySettings
    info = TierInfo(medium="remote", shared=True, persistent=True, bounded_by="storage", ttl_by="tier")
    transient = ()  # the client's exceptions become ours (faults)

    settings: ValkeySettings

    def __init__(self, settings: ValkeySettings, context: TierContext) -> None:
        """Keep both; no I/O."""
        super().__init__(settings, context)
        self._server = Server(settings.location)
        self._description = f"{settings.prefix}:{context.namespace}".encode()
        self._beginning = self._description + b":"
        lifetime = () if settings.ttl is None else (b"PX", b"%d" % max(1, round(settings.ttl * 1000)))
        self._options = len(lifetime)
        self._after_value = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in lifetime)
        nobody = self._beginning  # a block's name without a key: nothing is ever stored there
        self._after_numbers: Ending = (command(b"GET", nobody), Wire.nothing)
        self._after_others: Ending = (command(b"STRLEN", nobody), Wire.number)
        self._lock = threading.Lock()  # guards the one below
        self._told: set[str] = set()

    # Life.

    def open(self) -> None:
        """Show that the server answers and may be written to. Raises ``TierOpenError``. Cost: two requests."""
        if self.context.row_bytes > MOST_VALUE:
            raise TierOpenError(
                f"{self._name}: a block has {self.context.row_bytes} bytes, and a server takes at most {MOST_VALUE}: "
                "make blocks smaller (pool.block_size; in vLLM block_size or blocks_per_chunk)"
            )
        try:
            info = read_info(self._server.ask_one((b"INFO",), Wire.text, SILENCE_S))
            problem = why_not(info)
            if problem is None:
                self._describe()
        except OSError as error:
            raise TierOpenError(f"{self._name}: can't use the server: {error}{_what_to_do(error)}") from None
        if problem is not None:
            raise TierOpenError(f"{self._name}: {self._server.address} {problem}")
        if (risk := risk_of(info, self.settings.ttl)) is not None:
            self.context.log.warning(
                "%s: %s %s. Set its maxmemory, and maxmemory-policy to allkeys-lru or allkeys-lfu if all that it holds "
                "may be lost, else set ttl and a volatile policy",
                self._name,
                self._server.address,
                risk,
            )

    def _describe(self) -> None:
        text = json.dumps(self.context.description, sort_keys=True, default=str).encode()
        (outcome,) = self._store([self._description], [memoryview(text)])
        if outcome is not None and not isinstance(outcome, ServerFullError):
            raise outcome

    def close(self) -> None:
        """Close all connections."""
        self._server.close()

    def remove_namespace(self) -> None:
        """Remove every key of the namespace. Raises ``OSError``."""
        self._server.remove_all(self._beginning, self.settings.limits.store_timeout)
        self._unlink([self._description])

    # Blocks.

    def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool | Exception]:
        """Which of *keys* are stored, whole; in one round trip."""
        names, size = self._names(keys), self.context.row_bytes
        answers = self._ask(
            names,
            [of_each(b"STRLEN", names)],
            lambda wire: wire.numbers(len(names), size),
            self.settings.limits.lookup_timeout,
            self._after_numbers,
        )
        return [answer if isinstance(answer, OSError) else answer == size for answer in answers]

    def holds(self, keys: Sequence[OffloadKey]) -> Sequence[bool | Exception]:
        """As ``contains``. For the server it is a use of the block, as a store would be."""
        return self.contains(keys)

    def store(self, key: OffloadKey, block: memoryview) -> None:
        """Store one block. Raises ``OSError``."""
        (outcome,) = self._store(self._names([key]), [block])
        if outcome is not None:
            raise outcome

    def store_many(
        self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
    ) -> Sequence[bool | Exception]:
        """Store blocks; False for one that the full server declined."""
        outcomes = self._store(self._names(keys), blocks)
        full = next((outcome for outcome in outcomes if isinstance(outcome, ServerFullError)), None)
        if full is not None:
            self._tell_once(
                f"the server is full, and evicts nothing: blocks are declined until it has room ({full}). Set its "
                "maxmemory-policy to allkeys-lru, or give it more maxmemory",
                about="full",
            )
        return [_stored(outcome) for outcome in outcomes]

    def load(self, key: OffloadKey, into: memoryview) -> bool:
        """Fill *into*. Raises ``OSError``."""
        (outcome,) = self.load_many([key], [into])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def load_many(
        self, keys: Sequence[OffloadKey], intos: Sequence[memoryview]
    ) -> Sequence[bool | Exception]:
        """Fill each from the socket; False for a block that is absent or of another size."""
        names = self._names(keys)
        return self._ask(
            names,
            [of_each(b"GET", names)],
            lambda wire: wire.fill(intos),
            self.settings.limits.load_timeout,
            self._after_others,
        )

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks. Raises ``OSError``."""
        if keys:
            self._unlink(self._names(keys))

    def _store(self, names: Sequence[bytes], values: Sequence[memoryview]) -> list[OSError | None]:
        parts: list[Part] = []
        for name, value in zip(names, values, strict=True):
            parts += (set_command(name, len(value), self._options), value, self._after_value)
        return self._ask(
            names,
            parts,
            lambda wire: wire.all_done(len(names)),
            self.settings.limits.store_timeout,
            self._after_others,
        )

    def _ask(
        self,
        names: Sequence[bytes],
        commands: Sequence[Part],
        read: Callable[[Wire], Iterator[_T]],
        seconds: float,
        ending: Ending,
    ) -> list[_T | OSError]:
        """What the server answers about each of *names*. What is no block has its name in the answer."""
        answers = self._server.ask(commands, read, len(names), seconds, ending)
        confused = next((answer for answer in answers if isinstance(answer, ServerConfusedError)), None)
        if confused is not None:
            self._tell_once(
                f"{confused}. No answer of that call counts, and its connection is closed. If it happens again, look "
                "at what stands between here and the server",
                about="confused",
            )
        return [
            NotABlockError(f"{answer}; its name is {name!r}")
            if isinstance(answer, NotABlockError)
            else answer
            for name, answer in zip(names, answers, strict=True)
        ]

    def _tell_once(self, text: str, *, about: str) -> None:
        with self._lock:
            is_told = about in self._told
            self._told.add(about)
        if not is_told:
            self.context.log.warning("%s: %s", self._name, text)

    def _unlink(self, names: Sequence[bytes]) -> None:
        self._server.ask_one((b"UNLINK", *names), Wire.number, self.settings.limits.store_timeout)

    def _names(self, keys: Sequence[OffloadKey]) -> list[bytes]:
        return [self._beginning + key for key in keys]

    @property
    def _name(self) -> str:
        return f"tier {self.context.name!r} (kvtier-valkey)"


def _stored(outcome: OSError | None) -> bool | OSError:
    if outcome is None:
        return True
    return False if isinstance(outcome, ServerFullError) else outcome


def _what_to_do(error: OSError) -> str:
    """What the server said has it already."""
    if isinstance(error, ServerRefusedError | ServerBusyError):
        return ""
    return (
        "; check that the server runs, and that url leads to it: rediss:// with its ssl_ options where it speaks TLS, "
        "redis:// where not"
    )
