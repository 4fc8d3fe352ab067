"""Blocks in a bucket of S3, Google Cloud Storage or Azure: many small ones in one object, and no request for a lookup.

::

    <url>/<namespace>/namespace.json  what the namespace stands for, and until when it is in use
    <url>/<namespace>/packs/<name>    blocks, and which they are (``packs``)
    <url>/<namespace>/keeper, uses    who removes what leaves, and which packs are used (``keeper``)

Puts its parts together: requests are ``Bucket``'s, what is where and what leaves ``PackTable``'s, when the bucket is
looked at and what that tells ``Follower``'s, when a store has to look first ``Room``'s, when this engine removes for
all ``Keeper``'s, namespaces in use and out of use ``Tenancy``'s.
"""

import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtier_core import TierOpenError
from kvtier_core.tier import BlockTier, OffloadKey, TierContext, TierInfo
from kvtier_fsspec.bucket import Bucket
from kvtier_fsspec.compression import Zstd, can_unpack
from kvtier_fsspec.faults import StorageError, open_error
from kvtier_fsspec.following import Follower
from kvtier_fsspec.keeper import Keeper
from kvtier_fsspec.packs import PACKS, Index, Pack, PackName, PackTable, Read, most_blocks
from kvtier_fsspec.room import Room, Turn
from kvtier_fsspec.scatter import Scatter
from kvtier_fsspec.settings import FsspecSettings
from kvtier_fsspec.tenancy import Tenancy

UPKEEP_S = 60.0
"""Between two signs of an engine that it uses the namespace."""


class ObjectTier(BlockTier):
    """Blocks as parts of objects below ``url``; the namespace is kept within ``capacity`` (64 GiB if unset)."""

    Settings = FsspecSettings
    info = TierInfo(
        medium="remote",
        shared=True,
        persistent=True,
        bounded_by="tier",
        ttl_by="tier",
        default_capacity=64 << 30,
        store_batch=2,
        load_batch=2,
        reports_contents=True,
    )

    follow_interval = 1.0

    settings: FsspecSettings

    def __init__(self, settings: FsspecSettings, context: TierContext) -> None:
        """Keep both; no I/O."""
        super().__init__(settings, context)
        self._bucket = Bucket(settings)
        self._table = PackTable(context.row_bytes, context.capacity_bytes, settings.ttl)
        self._lock = threading.Lock()  # guards the table; never held during I/O
        self._telling = threading.Lock()  # held while the core is told, so that it hears everything in order
        self._looking = threading.Lock()  # held during a look; taken before the one above
        self._follower = Follower(self._bucket, self._table, self._lock, context)
        self._room = Room(context.capacity_bytes)
        self._room_changed = threading.Condition(self._lock)
        self._tenancy = Tenancy(self._bucket, context, self._bucket.shown_url)
        self._writer = secrets.token_hex(4)
        self._keeper = Keeper(self._bucket, self._table, self._lock, context, self._writer)
        self._zstd = Zstd()
        self._packs_blocks = settings.compression == "zstd"
        self._has_just_looked = False
        self._upkeep_at = 0.0  # on the monotonic clock

    # Life.

    def open(self) -> None:
        """Show that blocks can be written and read, and learn what is there. Raises ``TierOpenError``.

        Where nothing may be written, but this namespace is there to be read, the tier ``stores_nothing``.
        Cost: three requests, and one for each pack; the time of two, one after the other, where packs are few.
        """
        if self._packs_blocks and not can_unpack():
            raise TierOpenError(
                f'tier {self.context.name!r} (kvtier-fsspec): compression = "zstd" needs a package that is not '
                "installed: pip install 'kvtier-fsspec[zstd]', or leave compression out"
            )
        try:
            with ThreadPoolExecutor(1) as meanwhile:
                looked = meanwhile.submit(self._look)
                self.stores_nothing = not self._tenancy.begin()
                looked.result()
            self._has_just_looked = True
        except StorageError as error:
            user = f"tier {self.context.name!r}"
            raise open_error(user, self._bucket.shown_url, error, self.settings.protocol) from None
        self._upkeep_at = 0.0

    def follow(self) -> None:
        """Learn what others stored and removed, and remove what is too old; once a minute sign. Raises ``OSError``.

        Cost: a request per 1,000 packs, once a minute where there are many, and one for each pack that is new.
        """
        is_first, self._has_just_looked = self._has_just_looked, False
        if not is_first:
            self._look()
        self._tell()
        with self._lock:
            expired, needed = self._table.expired(time.time()), self._table.bytes
        if self.stores_nothing:
            return
        if time.monotonic() >= self._upkeep_at:
            self._upkeep_at = time.monotonic() + UPKEEP_S
            self._tenancy.renew(needed)
            if not is_first:
                self._keeper.share_uses()
        self._remove([*expired, *self._keeper.surplus()])

    def close(self) -> None:
        """Let the client go. A namespace that nobody else can have is out of use from now on."""
        self._tenancy.end()
        self._bucket.close()

    def remove_namespace(self) -> None:
        """Remove every object of the namespace and none of a tier whose URL lies in it. Raises ``OSError``."""
        self._tenancy.removed()
        folder = self.context.namespace
        self._bucket.remove_rest(folder, [found.path for found in self._bucket.objects(folder)])
        with self._lock:
            self._table.drop(self._table.names)

    # Blocks.

    def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Which of *keys* are there, from memory."""
        with self._lock:
            return self._table.find(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks are used."""
        with self._lock:
            self._table.use(keys, time.time())

    def store(self, key: OffloadKey, block: memoryview) -> None:
        """Store one block. Raises ``OSError``."""
        self._store([key], [block])

    def store_many(
        self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
    ) -> Sequence[bool | Exception]:
        """Store blocks in as few packs as their sizes allow, each whole or not at all; one request each."""
        most = most_blocks(self.context.row_bytes, self.context.capacity_bytes)
        outcomes: list[bool | Exception] = []
        for begin in range(0, len(keys), most):
            part = slice(begin, begin + most)
            try:
                self._store(keys[part], blocks[part])
            except StorageError as error:
                outcomes += [error] * len(keys[part])
            else:
                outcomes += [True] * len(keys[part])
        return outcomes

    def _store(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> None:
        stored = [self._zstd.pack(block) for block in blocks] if self._packs_blocks else blocks
        sizes = tuple(map(len, stored))
        is_packed = min(sizes) < self.context.row_bytes
        index = Index(tuple(keys), sizes if is_packed else None)
        needed = sum(sizes) + len(index.text())
        self._wait_for_turn(needed)
        try:
            self._make_room(needed)
            self._write(index, stored)
        finally:
            with self._lock:
                self._room.stored(needed)
                self._room_changed.notify_all()

    def _wait_for_turn(self, needed: int) -> None:
        """Until it is known well enough what the bucket holds. Raises ``StorageError`` where it can't be found out."""
        while True:
            with self._lock:
                turn = self._room.next_turn(needed, self._table.bytes)
                if turn is Turn.WAIT:
                    self._room_changed.wait()
            if turn is Turn.GO:
                return
            if turn is Turn.LOOK:
                try:
                    self._look(at_all=True)
                finally:
                    with self._lock:
                        self._room.end_turn()
                        self._room_changed.notify_all()
                self._tell()

    def _look(self, *, at_all: bool = False) -> None:
        with self._looking:
            with self._lock:
                shown = self._room.begin_look()
            self._follower.look(at_all=at_all)
            with self._lock:
                self._room.looked(shown)
                self._room_changed.notify_all()

    def _write(self, index: Index, stored: Sequence[memoryview | bytes]) -> None:
        text, packed = index.text(), None if index.sizes is None else sum(index.sizes)
        with self._lock:
            stamp = self._table.next_stamp(time.time())
        name = PackName.of(stamp, self._writer, len(stored), len(text), packed)
        self._bucket.write(self._path(name.text), [*stored, text])
        with self._lock:
            self._table.add([Pack(name, index, time.monotonic(), time.time())])
        self._tell()

    def _make_room(self, needed: int) -> None:
        """Remove what nobody uses, then the packs that were not used for longest. Raises ``StorageError``."""
        with self._lock:
            total = self._table.bytes + needed
        self._tenancy.make_room(total)
        with self._lock:
            going = self._table.make_room(needed, time.time())
        try:
            self._bucket.remove([self._path(pack.name.text) for pack in going])
        except StorageError:
            with self._lock:
                self._table.add(going)
            raise
        self._tell()

    def load(self, key: OffloadKey, into: memoryview) -> bool:
        """Read one block. Raises ``OSError``."""
        (outcome,) = self.load_many([key], [into])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def load_many(
        self, keys: Sequence[OffloadKey], intos: Sequence[memoryview]
    ) -> Sequence[bool | Exception]:
        """Read blocks, neighbours in one request."""
        with self._lock:
            reads = self._table.plan(keys)
            self._table.use(keys, time.time())
        outcomes: list[bool | Exception] = [False] * len(keys)
        for read in reads:
            outcome = self._read(read, intos)
            for _, position in read.wanted:
                outcomes[position] = outcome
        return outcomes

    def _read(self, read: Read, intos: Sequence[memoryview]) -> bool | Exception:
        size = self.context.row_bytes
        name = read.pack.name.text
        scatter = Scatter(read, size, intos, self._zstd.unpack)
        begin = read.pack.end_of(read.first - 1, size)
        count = read.pack.end_of(read.end - 1, size) - begin
        try:
            came = self._bucket.read_range(self._path(name), begin, count, scatter.take)
        except StorageError as error:
            self._follower.doubt(read.pack)
            self._tell()
            return error
        if came is None:  # somebody evicted it
            self._forget([name])
            return False
        if came != count:
            return StorageError(f"{self._path(name)} ends in the middle of a block", frozenset())
        return True

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Note for all engines that these blocks are not there. Raises ``OSError``."""
        with self._lock:
            there = [key for key, found in zip(keys, self._table.find(keys), strict=True) if found]
        if there:
            self._write(Index(tuple(there)), ())

    def _remove(self, names: Sequence[str]) -> None:
        self._forget(names)
        self._bucket.remove([self._path(name) for name in names])

    def _forget(self, names: Sequence[str]) -> None:
        with self._lock:
            self._table.drop(names)
        self._tell()

    def _tell(self) -> None:
        """Tell the core what has changed."""
        with self._telling:
            with self._lock:
                appeared, gone = self._table.take_changes()
            self.context.report_evicted(gone)
            self.context.report_stored(appeared)

    def _path(self, name: str) -> str:
        return f"{self.context.namespace}/{PACKS}/{name}"
