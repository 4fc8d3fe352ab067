"""Looks at a bucket from time to time: which packs are new, and which are gone.

Decides when all packs are listed and when only the newest, and how long one look may take.
"""

import threading
import time
from collections.abc import Sequence

from kvtier_core.tier import TierContext
from kvtier_fsspec.bucket import Bucket
from kvtier_fsspec.compression import can_unpack
from kvtier_fsspec.layout import LONGEST_SCAN_S
from kvtier_fsspec.packs import NOTHING, PACKS, Index, Pack, PackName, PackTable, first_name_of

LIST_ALL_S = 60.0
"""Between two listings of all packs, at least."""
LISTED_A_SECOND = 100
"""Packs, in the middle: a bucket of 150,000 is listed whole every 25 minutes, which is a request in 10 s."""
LATE_S = 15.0
"""A pack that appears this much later than its name says, or its writer's clock, is found when all are listed."""
_FEW = 900
"""Packs that one request lists with room for new ones: then every look lists all."""
_AT_ONCE = 256
"""Indexes read before the clock is looked at."""


class Follower:
    """Keeps a table of what the bucket holds. For one thread at a time."""

    def __init__(self, bucket: Bucket, table: PackTable, lock: threading.Lock, context: TierContext) -> None:
        """*lock* guards *table*. No I/O."""
        self._bucket = bucket
        self._table = table
        self._lock = lock
        self._context = context
        self._list_all_at = 0.0  # on the monotonic clock
        self._listed_at = 0.0  # seconds since the epoch
        self._told = ""
        self._unpacks = can_unpack()
        self._has_told_packed = False
        self._unread: set[str] = set()
        """Packs that are entered without their keys, because those could not be read yet: they take room."""

    def look(self, *, at_all: bool = False) -> None:
        """Learn what is there now, *at_all* also of packs that are not new. Raises ``StorageError``.

        A pack whose index can't be read is tried again by the next look, and told once.
        """
        begun, began = time.monotonic(), time.time()
        with self._lock:
            count = len(self._table)
        lists_all = at_all or begun >= self._list_all_at or count < _FEW
        after = "" if lists_all else first_name_of(int((self._listed_at - LATE_S) * 1000))
        folder = f"{self._context.namespace}/{PACKS}"
        listed = {found.path.rpartition("/")[2]: found.size for found in self._bucket.below(folder, after)}
        with self._lock:
            if lists_all:
                self._table.drop(self._table.lacking(listed, begun))
            self._unread.intersection_update(self._table.names)
            new = {
                text: size for text, size in listed.items() if text not in self._table or text in self._unread
            }
        names = [(name, size) for text, size in new.items() if (name := PackName.read(text)) is not None]
        is_complete = self._learn(names, begun + LONGEST_SCAN_S)
        self._listed_at = began
        if lists_all:
            self._list_all_at = begun + max(LIST_ALL_S, count / LISTED_A_SECOND) if is_complete else begun

    def doubt(self, pack: Pack) -> None:
        """A pack could not be read: its blocks don't count until the next look has read its keys again."""
        name = pack.name.text
        with self._lock:
            if name in self._table:
                self._table.drop([name])
                self._table.add([Pack(pack.name, NOTHING, pack.known)])
                self._unread.add(name)

    def _learn(self, found: Sequence[tuple[PackName, int]], give_up: float) -> bool:
        """Enter packs that are new, with their sizes, the newest first; whether all are known now."""
        size = self._context.row_bytes
        damaged = [name for name, has in found if has != name.bytes(size)]
        self._enter(damaged, [b""] * len(damaged))
        whole = sorted((name for name, has in found if has == name.bytes(size)), key=_text, reverse=True)
        is_complete = True
        for begin in range(0, len(whole), _AT_ONCE):
            if time.monotonic() > give_up:
                self._tell("the bucket is slow")
                self._enter_unread(whole[begin:])
                return False
            names = whole[begin : begin + _AT_ONCE]
            indexes = self._bucket.read_ranges(
                [(self._path(name), name.index_at(size), name.index_bytes) for name in names]
            )
            faults = [index for index in indexes if isinstance(index, Exception)]
            if faults:
                self._tell(str(faults[0]))
                is_complete = False
            self._enter(names, indexes)
        return is_complete

    def _tell(self, why: str) -> None:
        if why != self._told:
            self._told = why
            self._context.log.warning(
                "tier %r (kvtier-fsspec): not all packs could be looked into (%s): they take room, and their blocks "
                "are found later",
                self._context.name,
                why,
            )

    def _enter(self, names: Sequence[PackName], indexes: Sequence[bytes | Exception | None]) -> None:
        now, wall = time.monotonic(), time.time()
        found = list(zip(names, indexes, strict=True))
        packs = [
            Pack(name, self._index_of(name, index), now, wall)
            for name, index in found
            if isinstance(index, bytes)
        ]
        with self._lock:
            read = self._unread.intersection(pack.name.text for pack in packs)
            self._table.drop(read)
            self._table.add(packs)
            self._unread -= read
        self._enter_unread([name for name, index in found if isinstance(index, Exception)])

    def _enter_unread(self, names: Sequence[PackName]) -> None:
        now, wall = time.monotonic(), time.time()
        with self._lock:
            new = [name for name in names if name.text not in self._table]
            self._table.add(Pack(name, NOTHING, now, wall) for name in new)
            self._unread.update(name.text for name in new)

    def _index_of(self, name: PackName, text: bytes) -> Index:
        """What is in a pack; nothing where that is damaged, or this engine can't unpack it."""
        index = Index.read(text)
        if index is None or not index.fits(name, self._context.row_bytes):
            self._context.log.warning(
                "tier %r (kvtier-fsspec): the object %s is damaged: its blocks are not served, and it is removed when "
                "its room is needed",
                self._context.name,
                self._path(name),
            )
            return NOTHING
        if index.sizes is not None and not self._unpacks:
            if not self._has_told_packed:
                self._has_told_packed = True
                self._context.log.warning(
                    "tier %r (kvtier-fsspec): other engines store compressed blocks in %s, which are not found here: "
                    "pip install 'kvtier-fsspec[zstd]' and start again",
                    self._context.name,
                    self._context.namespace,
                )
            return NOTHING
        return index

    def _path(self, name: PackName) -> str:
        return f"{self._context.namespace}/{PACKS}/{name.text}"


def _text(name: PackName) -> str:
    return name.text
