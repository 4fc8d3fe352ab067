"""The client behind a tier: made when it is needed, made anew after a fault and after a fork.

Decides how long one client is used. Never retries, and knows nothing of blocks.

Three kinds of staleness are kept out here. *Listings*: a file system that remembers directory listings does not see
what other processes store, so that its memory is switched off. *Credentials*: they are read when the object is made,
so that after a fault the next object is made, which reads them anew. *Forks*: an event loop and its
connections don't survive one, so that each process has an object of its own.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, cast

import fsspec
from fsspec.dircache import DirCache

from kvtier_core.tier import mask_text, secrets_in_options
from kvtier_fsspec.faults import StorageError, kinds_of, words

T = TypeVar("T")
_END: Any = object()
_SECRET_VARIABLES = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_CLIENT_SECRET",
)

_FRESH_S = (
    1.0  # a file system this young has fresh credentials; making one for every fault would take too much CPU
)


class _PerProcess:
    """What one process has of a connection."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards the two below; never held during I/O
        self.client: tuple[Any, ...] | None = None
        self.made = 0.0  # on the monotonic clock


class Connection:
    """One URL with its options. Safe from any thread, and in a forked child."""

    def __init__(self, url: str, options: Mapping[str, Any], make: Callable[[], tuple[Any, ...]]) -> None:
        """*make* gives the client: what ``call`` hands to its work. No I/O."""
        self._url = url
        self._make = make
        self._secrets = frozenset(secrets_in_options(options)) | _secrets_in_environment()
        self._by_pid: dict[int, _PerProcess] = {}

    @property
    def shown_url(self) -> str:
        """The URL without its secrets."""
        return self.masked(self._url)

    def masked(self, text: str) -> str:
        """*text* without anything secret about this connection."""
        return mask_text(text, self._secrets)

    def call(self, work: Callable[..., T]) -> T:
        """``work(*client)``. Raises ``StorageError`` for whatever it raises.

        Absence is no fault and is for *work* to handle; an exception that leaves it ends the use of that client, unless
        that was made within the last second.
        Cost: that of *work*; the first call of a process, and the first after a fault, also makes the client.
        """
        mine = self._mine()
        client = None
        try:
            with mine.lock:
                if mine.client is None:
                    mine.client = self._make()
                    mine.made = time.monotonic()
                client = mine.client
            return work(*client)
        except BaseException as error:  # clients raise whatever the libraries below them raise
            if not _is_fault(error):
                raise
            fault = self._fault(client, error)
        # Not chained: a traceback would show the original's message, secrets included.
        raise fault from None

    def call_iter(self, work: Callable[..., Iterator[T]]) -> Iterator[T]:
        """As ``call``, for work that yields."""
        found = self.call(work)
        while (one := self.call(lambda *_client: next(found, _END))) is not _END:
            yield cast("T", one)

    def call_each(self, work: Callable[..., Sequence[T | Exception]]) -> list[T | Exception]:
        """As ``call``, for work of many parts: an exception in the place of an answer becomes a ``StorageError``."""
        return self.call(
            lambda *client: [
                self._fault(client, outcome) if _is_fault(outcome) else outcome for outcome in work(*client)
            ]
        )

    def close(self) -> None:
        """Give up this process's client. Twice is fine."""
        self._by_pid.pop(os.getpid(), None)

    def _mine(self) -> _PerProcess:
        return self._by_pid.get(os.getpid()) or self._by_pid.setdefault(os.getpid(), _PerProcess())

    def _fault(self, client: object, error: BaseException) -> StorageError:
        """*error* without secrets. Whatever raised it is not used again, unless it is new."""
        mine = self._mine()
        with mine.lock:
            # Another thread may have met the fault first, and a third one made the next already.
            if mine.client == client and time.monotonic() - mine.made >= _FRESH_S:
                mine.client = None
        return StorageError(self.masked(words(error)), kinds_of(error))


def _is_fault(outcome: object) -> TypeGuard[BaseException]:
    """Whether it is an exception; not one that ends the program. Rust's panics are no ``Exception``."""
    return isinstance(outcome, Exception) or type(outcome).__name__ == "PanicException"


def file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system for *url*, and the path there."""
    filesystem, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    if isinstance(getattr(filesystem, "dircache", None), DirCache):
        # Not passed as an option: some file systems hand options they don't know to their servers.
        filesystem.dircache = DirCache(use_listings_cache=False)
    return filesystem, str(root).rstrip("/")


def _secrets_in_environment() -> frozenset[str]:
    """Those that clients take from there by themselves."""
    return frozenset(filter(None, map(os.environ.get, _SECRET_VARIABLES)))
