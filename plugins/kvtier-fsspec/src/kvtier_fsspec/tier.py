"""The tier a configuration names ``fsspec``: puts its parts together, and says what to do when it can't open.

Names and sizes are ``ObjectLayout``'s, publishing is ``WholePuts``' or ``MovedFiles``', the life of the file system
``Connection``'s, namespaces in use and out of use are ``Tenancy``'s; capacity, eviction and threads are the core's.
URLs of object stores are ``ObjectTier``'s.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from kvtier_core import TierOpenError
from kvtier_core.tier import BlockInfo, BlockTier, OffloadKey, TierContext, TierInfo, TierSettings
from kvtier_fsspec.connection import Connection, file_system
from kvtier_fsspec.faults import StorageError, open_error
from kvtier_fsspec.layout import ObjectLayout
from kvtier_fsspec.many import Requests
from kvtier_fsspec.object_tier import ObjectTier
from kvtier_fsspec.places import FileSystemPlace
from kvtier_fsspec.publishing import MovedFiles, Publisher, WholePuts, moves_files
from kvtier_fsspec.settings import OBJECT_STORES, FsspecSettings
from kvtier_fsspec.tenancy import Tenancy


class FsspecTier(BlockTier):
    """Blocks as objects below ``url``; the core keeps what it knows of within ``capacity`` (64 GiB where unset)."""

    Settings = FsspecSettings
    info = TierInfo(medium="remote", shared=True, persistent=True, default_capacity=64 << 30)

    follow_interval = 60.0

    settings: FsspecSettings

    @classmethod
    def for_settings(cls, settings: TierSettings) -> type[BlockTier]:
        """``ObjectTier`` for the URL of an object store."""
        is_bucket = isinstance(settings, FsspecSettings) and settings.protocol in OBJECT_STORES
        return ObjectTier if is_bucket else cls

    def __init__(self, settings: FsspecSettings, context: TierContext) -> None:
        """Keep both; no I/O."""
        super().__init__(settings, context)
        make = partial(file_system, settings.url, settings.storage_options)
        self._connection = Connection(settings.url, settings.storage_options, make)
        self._requests = Requests(settings.parallel_requests)
        self._layout: ObjectLayout | None = None
        self._tenancy: Tenancy | None = None
        self._held: set[OffloadKey] = set()
        self._lock = threading.Lock()  # guards what is held

    def open(self) -> None:
        """Show that blocks can be written and read. Raises ``TierOpenError``. Cost: two requests.

        Where nothing may be written, but this namespace is there to be read, the tier ``stores_nothing``.
        """
        context, shown_url = self.context, self._connection.shown_url
        try:
            moves = self._connection.call(lambda fs, _root: moves_files(fs))
            publisher = self._publisher(moves=moves)
            self._layout = ObjectLayout(
                self._connection,
                publisher,
                context.namespace,
                block_bytes=context.row_bytes,
                requests=self._requests,
                log=context.log,
            )
            place = FileSystemPlace(self._connection, publisher, self._requests)
            self._tenancy = Tenancy(place, context, shown_url)
            self.stores_nothing = not self._tenancy.begin()
        except StorageError as error:
            raise open_error(f"tier {context.name!r}", shown_url, error, self.settings.protocol) from None

    def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool | Exception]:
        """Which of *keys* are stored, an ``OSError`` for one that could not be asked about. Raises ``OSError``."""
        return self._opened.have(keys)

    def holds(self, keys: Sequence[OffloadKey]) -> Sequence[bool | Exception]:
        """Which of *keys* are stored and of a block's size. Raises ``OSError``. Cost: a request each."""
        answers = self._opened.have(keys, whole=True)
        with self._lock:
            self._held.update(key for key, answer in zip(keys, answers, strict=True) if answer is True)
        return answers

    def store(self, key: OffloadKey, block: memoryview) -> None:
        """Store one block. Raises ``OSError``, and then it is not there, or whole where only the answer was lost."""
        with self._lock:
            self._held.add(key)
        try:
            self._staying.make_room(self._needed)
            self._opened.put(key, block)
        except BaseException:
            self._let_go([key])
            raise

    def load(self, key: OffloadKey, into: memoryview) -> bool:
        """Read one block; zeros where it is too short or too long. Raises ``OSError`` when it can't be read."""
        is_there = self._opened.get(key, into)
        if not is_there:
            self._let_go([key])
        return is_there

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks. Raises ``OSError``."""
        self._opened.remove(keys)
        self._let_go(keys)

    def close(self) -> None:
        """Let the file system go. A namespace that nobody else can have is out of use from now on."""
        self._layout = None
        self._held.clear()
        if self._tenancy is not None:
            self._tenancy.end()
        self._connection.close()

    def scan(self) -> Iterator[BlockInfo]:
        """Every stored block of the namespace, whoever stored it. Raises ``OSError``."""
        for block in self._opened.scan(may_remove=not self.stores_nothing):
            self._held.add(block.key)
            yield block

    def follow(self) -> None:
        """Say that the namespace is in use, learn which others are not, and make room among those."""
        self._staying.renew(self._needed)

    def remove_namespace(self) -> None:
        """Remove every object of the namespace. Raises ``OSError``."""
        self._staying.removed()
        self._opened.remove_all()

    @property
    def _needed(self) -> int:
        with self._lock:
            return len(self._held) * self.context.row_bytes

    def _let_go(self, keys: Iterable[OffloadKey]) -> None:
        with self._lock:
            self._held.difference_update(keys)

    @property
    def _staying(self) -> Tenancy:
        assert self._tenancy is not None, "used before open"
        return self._tenancy

    @property
    def _opened(self) -> ObjectLayout:
        assert self._layout is not None, "used before open"
        return self._layout

    def _publisher(self, *, moves: bool) -> Publisher:
        how = self.settings.publish
        if how == "auto":
            if self.settings.protocol == "memory":
                how = "put"
            elif moves:
                how = "move"
            else:
                raise TierOpenError(
                    f"tier {self.context.name!r} (kvtier-fsspec): can't use {self._connection.shown_url}: it is not "
                    f"known whether {self.settings.protocol}:// shows half-written objects; set publish = "
                    '"put" if a put there is visible whole or not at all, else use another protocol'
                )
        return WholePuts(self._requests) if how == "put" else MovedFiles(self._requests)
