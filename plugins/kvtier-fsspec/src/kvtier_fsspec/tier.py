"""The tier a configuration names ``fsspec``: puts its parts together, and says what to do when it can't open.

Names and sizes are ``ObjectLayout``'s, publishing is ``WholePuts``' or ``MovedFiles``', the life of the file system
``Connection``'s; capacity, eviction and threads are the core's.
"""

from collections.abc import Iterable, Sequence

from kvtier_core import BlockInfo, BlockTier, OffloadKey, TierContext, TierInfo, TierOpenError
from kvtier_fsspec.connection import Connection
from kvtier_fsspec.faults import StorageError, advice
from kvtier_fsspec.layout import ObjectLayout
from kvtier_fsspec.many import Requests
from kvtier_fsspec.publishing import MovedFiles, Publisher, WholePuts, moves_files
from kvtier_fsspec.settings import OBJECT_STORES, FsspecSettings

_PUT_WHOLE = OBJECT_STORES | {"memory"}


class FsspecTier(BlockTier):
    """Blocks as objects below ``url``; the core keeps what it knows of within ``capacity`` (64 GiB where unset)."""

    Settings = FsspecSettings
    info = TierInfo(medium="remote", shared=True, persistent=True, default_capacity=64 << 30)

    settings: FsspecSettings

    def __init__(self, settings: FsspecSettings, context: TierContext) -> None:
        """Keep both; no I/O."""
        super().__init__(settings, context)
        self._connection = Connection(
            settings.url, settings.storage_options, connections=settings.threads + settings.parallel_requests
        )
        self._requests = Requests(settings.parallel_requests)
        self._layout: ObjectLayout | None = None

    def open(self) -> None:
        """Show that blocks can be written and read. Raises ``TierOpenError``. Cost: two requests.

        Where nothing may be written, but this namespace is there to be read, the tier ``stores_nothing``.
        """
        try:
            moves = self._connection.call(lambda fs, _root: moves_files(fs))
            self._layout = ObjectLayout(
                self._connection,
                self._publisher(moves=moves),
                self.context.namespace,
                block_bytes=self.context.row_bytes,
                requests=self._requests,
                log=self.context.log,
            )
            self._describe(self._layout)
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

    def store(self, key: OffloadKey, block: memoryview) -> None:
        """Store one block. Raises ``OSError``, and then it is not there, or whole where only the answer was lost."""
        self._opened.put(key, block)

    def load(self, key: OffloadKey, into: memoryview) -> bool:
        """Read one block; zeros where it is too short or too long. Raises ``OSError`` when it can't be read."""
        return self._opened.get(key, into)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks. Raises ``OSError``."""
        self._opened.remove(keys)

    def close(self) -> None:
        """Let the file system go."""
        self._connection.close()

    def scan(self) -> Iterable[BlockInfo]:
        """Every stored block of the namespace, whoever stored it. Raises ``OSError``."""
        return self._opened.scan(may_remove=not self.stores_nothing)

    def remove_namespace(self) -> None:
        """Remove every object of the namespace. Raises ``OSError``."""
        self._opened.remove_all()

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
