"""The file system behind a tier: made when it is needed, made anew after a fault and after a fork.

Decides how long one file system object is used. Never retries, and knows nothing of blocks.

Three kinds of staleness are kept out here. *Listings*: a file system that remembers directory listings does not see
what other processes store, so that its memory is switched off. *Credentials*: they are read when the object is made,
so that after a fault the next object is made, which reads them anew. *Forks*: an event loop and its
connections don't survive one, so that each process has an object of its own.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import fsspec
from fsspec.dircache import DirCache

from kvtier_core.tier import mask_text, secrets_in_options
from kvtier_fsspec.faults import StorageError, kinds_of, words

T = TypeVar("T")

# Tries by s3fs and, within each, by the client below it. Their defaults, 5 by 5, take half a minute to fail.
_S3_TRIES = 2
_FRESH_S = (
    1.0  # a file system this young has fresh credentials; making one for every fault would take too much CPU
)


class _PerProcess:
    """What one process has of a connection."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards the three below; never held during I/O
        self.filesystem: Any = None
        self.root = ""
        self.made = 0.0  # on the monotonic clock


class Connection:
    """One URL with its options. Safe from any thread, and in a forked child."""

    def __init__(self, url: str, options: Mapping[str, Any], *, connections: int) -> None:
        """For at most *connections* requests at a time. No I/O."""
        self._url = url
        self._options = options
        self._connections = connections
        self._secrets = frozenset(secrets_in_options(options))
        self._by_pid: dict[int, _PerProcess] = {}

    @property
    def shown_url(self) -> str:
        """The URL without its secrets."""
        return self.masked(self._url)

    def masked(self, text: str) -> str:
        """*text* without anything secret about this connection."""
        return mask_text(text, self._secrets)

    def call(self, work: Callable[[Any, str], T]) -> T:
        """``work(file system, path of the URL)``. Raises ``StorageError`` for whatever it raises.

        Absence is no fault and is for *work* to handle; an exception that leaves it ends the use of that file system,
        unless that was made within the last second.
        Cost: that of *work*; the first call of a process, and the first after a fault, also makes the file system
        (for S3 some 0.2 s of CPU).
        """
        mine = self._mine()
        filesystem = None
        try:
            with mine.lock:
                if mine.filesystem is None:
                    mine.filesystem, mine.root = self._make()
                    mine.made = time.monotonic()
                filesystem, root = mine.filesystem, mine.root
            return work(filesystem, root)
        except Exception as error:  # noqa: BLE001 - file systems raise whatever the libraries below them raise
            fault = self._fault(filesystem, error)
        # Not chained: a traceback would show the original's message, secrets included.
        raise fault from None

    def call_each(self, work: Callable[[Any, str], Sequence[T | Exception]]) -> list[T | Exception]:
        """As ``call``, for work of many parts: an exception in the place of an answer becomes a ``StorageError``."""
        return self.call(
            lambda filesystem, root: [
                self._fault(filesystem, outcome) if isinstance(outcome, Exception) else outcome
                for outcome in work(filesystem, root)
            ]
        )

    def close(self) -> None:
        """Give up this process's file system. Twice is fine."""
        self._by_pid.pop(os.getpid(), None)

    def _mine(self) -> _PerProcess:
        return self._by_pid.get(os.getpid()) or self._by_pid.setdefault(os.getpid(), _PerProcess())

    def _fault(self, filesystem: object, error: Exception) -> StorageError:
        """*error* without secrets. Whatever raised it is not used again, unless it is new."""
        mine = self._mine()
        with mine.lock:
            # Another thread may have met the fault first, and a third one made the next already.
            if mine.filesystem is filesystem and time.monotonic() - mine.made >= _FRESH_S:
                mine.filesystem = None
        return StorageError(self.masked(words(error)), kinds_of(error))

    def _make(self) -> tuple[Any, str]:
        is_s3fs = _is_of("s3fs", fsspec.get_filesystem_class(self._url.partition("://")[0]))
        options = _with_s3fs_defaults(self._options, self._connections) if is_s3fs else self._options
        filesystem, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True, **options)
        if isinstance(getattr(filesystem, "dircache", None), DirCache):
            # Not passed as an option: some file systems hand options they don't know to their servers.
            filesystem.dircache = DirCache(use_listings_cache=False)
        if is_s3fs:
            filesystem.retries = _S3_TRIES
        return filesystem, str(root).rstrip("/")


def _is_of(package: str, filesystem_class: type[Any]) -> bool:
    """Whether a class, or one that it builds on, comes from *package*: several implement one protocol."""
    return any(base.__module__.partition(".")[0] == package for base in filesystem_class.__mro__)


def _with_s3fs_defaults(options: Mapping[str, Any], connections: int) -> dict[str, Any]:
    # The client's own pool, 10 connections, would make the settings mean nothing.
    defaults = {"retries": {"total_max_attempts": _S3_TRIES}, "max_pool_connections": connections}
    return {**options, "config_kwargs": {**defaults, **options.get("config_kwargs", {})}}
