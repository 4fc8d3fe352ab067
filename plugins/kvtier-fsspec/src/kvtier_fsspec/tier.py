"""The tier a configuration names ``fsspec``: puts its parts together, and says what to do when it can't open.

Names and sizes are ``ObjectLayout``'s, publishing is ``WholePuts``' or ``MovedFiles``', the life of the file system
``Connection``'s, namespaces that nobody uses are ``UnusedNamespaces``'; capacity, eviction and threads are the core's.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

from kvtier_core import TierOpenError
from kvtier_core.tier import BlockInfo, BlockTier, OffloadKey, TierContext, TierInfo, is_of_one_process
from kvtier_fsspec.connection import Connection
from kvtier_fsspec.faults import StorageError, advice
from kvtier_fsspec.layout import ObjectLayout
from kvtier_fsspec.many import Requests
from kvtier_fsspec.publishing import MovedFiles, Publisher, WholePuts, moves_files
from kvtier_fsspec.settings import OBJECT_STORES, FsspecSettings
from kvtier_fsspec.unused import UnusedNamespaces

_PUT_WHOLE = OBJECT_STORES | {"memory"}


class FsspecTier(BlockTier):
    """Blocks as objects below ``url``; the core keeps what it knows of within ``capacity`` (64 GiB where unset)."""

    Settings = FsspecSettings
    info = TierInfo(medium="remote", shared=True, persistent=True, default_capacity=64 << 30)

    follow_interval = 60.0

    settings: FsspecSettings

    def __init__(self, settings: FsspecSettings, context: TierContext) -> None:
        """Keep both; no I/O."""
        super().__init__(settings, context)
        self._connection = Connection(
            settings.url, settings.storage_options, connections=settings.threads + settings.parallel_requests
        )
        self._requests = Requests(settings.parallel_requests)
        self._layout: ObjectLayout | None = None
        self._unused: UnusedNamespaces | None = None
        self._is_removed = False
        self._told = ""
        self._held: set[OffloadKey] = set()
        self._lock = threading.Lock()  # guards what is held

    def open(self) -> None:
        """Show that blocks can be written and read. Raises ``TierOpenError``. Cost: two requests.

        Where nothing may be written, but this namespace is there to be read, the tier ``stores_nothing``.
        """
        self._is_removed = False
        try:
            moves = self._connection.call(lambda fs, _root: moves_files(fs))
            publisher = self._publisher(moves=moves)
            context = self.context
            self._layout = ObjectLayout(
                self._connection,
                publisher,
                context.namespace,
                block_bytes=context.row_bytes,
                requests=self._requests,
                log=context.log,
            )
            self._describe(self._layout)
            self._unused = UnusedNamespaces(
                self._connection,
                publisher,
                context.namespace,
                context.capacity_bytes,
                self._requests,
                context.log,
            )
        except StorageError as error:
            raise self._open_error(f"{error}; {advice(error, self.settings.protocol)}") from None

    def _describe(self, layout: ObjectLayout) -> None:
        try:
            layout.describe(self.context.description)
        except StorageError as error:
            if not (error.may_not_write and layout.is_described()):
                raise
            self.stores_nothing = True
            self.context.log.warning(
                "tier %r (kvtier-fsspec): %s can't be written (%s): what others store there is loaded, and nothing is "
                "stored or deleted. To store, allow writing and deleting, and start again",
                self.context.name,
                self._connection.shown_url,
                error,
            )

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
            self._make_room()
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
        layout, self._layout = self._layout, None
        self._held.clear()
        if layout is not None and self._signs and is_of_one_process(self.context.description):
            with contextlib.suppress(StorageError):  # then it is out of use an hour from now
                layout.describe(self.context.description, in_use=False)
        self._connection.close()

    def scan(self) -> Iterator[BlockInfo]:
        """Every stored block of the namespace, whoever stored it. Raises ``OSError``."""
        for block in self._opened.scan(may_remove=not self.stores_nothing):
            self._held.add(block.key)
            yield block

    def follow(self) -> None:
        """Say that the namespace is in use, learn which others are not, and make room among those.

        A fault is told once. Cost: two requests and one for each namespace below the URL; more where one has newly come
        out of use.
        """
        if not self._signs:
            return
        try:
            self._opened.describe(self.context.description)
            self._others.learn()
            self._make_room()
        except StorageError as error:
            if str(error) != self._told:
                self._told = str(error)
                self.context.log.warning(
                    "tier %r (kvtier-fsspec): can't look after the namespaces below %s (%s): those that nobody uses "
                    "don't all count within capacity. It is tried again every minute; allow listing, reading, writing "
                    "and deleting there",
                    self.context.name,
                    self._connection.shown_url,
                    error,
                )

    def remove_namespace(self) -> None:
        """Remove every object of the namespace. Raises ``OSError``."""
        self._is_removed = True
        self._opened.remove_all()

    @property
    def _signs(self) -> bool:
        """Whether the namespace is one that this tier keeps in use."""
        return not self.stores_nothing and not self._is_removed

    def _make_room(self) -> None:
        with self._lock:
            needed = len(self._held) * self.context.row_bytes
        self._others.make_room(needed)

    def _let_go(self, keys: Iterable[OffloadKey]) -> None:
        with self._lock:
            self._held.difference_update(keys)

    @property
    def _others(self) -> UnusedNamespaces:
        assert self._unused is not None, "used before open"
        return self._unused

    @property
    def _opened(self) -> ObjectLayout:
        assert self._layout is not None, "used before open"
        return self._layout

    def _publisher(self, *, moves: bool) -> Publisher:
        how = self.settings.publish
        if how == "auto":
            if self.settings.protocol in _PUT_WHOLE:
                how = "put"
            elif moves:
                how = "move"
            else:
                raise self._open_error(
                    f"it is not known whether {self.settings.protocol}:// shows half-written objects; set publish = "
                    '"put" if a put there is visible whole or not at all, else use another protocol'
                )
        return WholePuts(self._requests) if how == "put" else MovedFiles(self._requests)

    def _open_error(self, what: str) -> TierOpenError:
        return TierOpenError(
            f"tier {self.context.name!r} (kvtier-fsspec): can't use {self._connection.shown_url}: {what}"
        )
