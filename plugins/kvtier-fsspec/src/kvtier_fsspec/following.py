"""Looks at a bucket from time to time: which packs are new, and which are gone.

Decides when all packs are listed and when only the newest, and how long one look may take.
"""

import threading
import time
from collections.abc import Sequence

from kvtier_core.tier import OffloadKey, TierContext
from kvtier_fsspec.bucket import Bucket
from kvtier_fsspec.layout import LONGEST_SCAN_S
from kvtier_fsspec.packs import Pack, PackName, PackTable, first_name_of, keys_in

PACKS = "packs"
_FEW = 900
"""Packs that one request lists with room for new ones: then every look lists all."""
_LIST_ALL_S = 60.0
_LATE_S = 15.0
"""A pack that appears this much later than its name says, or its writer's clock, is found when all are listed."""
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

    def look(self) -> None:
        """Learn what is there now. Raises ``StorageError`` where the bucket can't be listed.

        A pack whose index can't be read is tried again by the next look, and told once.
        """
        begun, began = time.monotonic(), time.time()
        with self._lock:
            lists_all = begun >= self._list_all_at or len(self._table) < _FEW
        after = "" if lists_all else first_name_of(int((self._listed_at - _LATE_S) * 1000))
        folder = f"{self._context.namespace}/{PACKS}"
        listed = {found.path.rpartition("/")[2]: found.size for found in self._bucket.below(folder, after)}
        with self._lock:
            if lists_all:
                self._table.drop(self._table.lacking(listed, begun))
            new = {text: size for text, size in listed.items() if text not in self._table}
        names = [(name, size) for text, size in new.items() if (name := PackName.read(text)) is not None]
        is_complete = self._learn(names, begun + LONGEST_SCAN_S)
        self._listed_at = began
        if lists_all:
            self._list_all_at = begun + _LIST_ALL_S if is_complete else begun

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
                return False
            names = whole[begin : begin + _AT_ONCE]
            indexes = self._bucket.read_ranges(
                [(self._path(name), name.blocks * size, name.index_bytes) for name in names]
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
                "tier %r (kvtier-fsspec): not all packs could be looked into (%s): their blocks are found later",
                self._context.name,
                why,
            )

    def _enter(self, names: Sequence[PackName], indexes: Sequence[bytes | Exception | None]) -> None:
        now = time.monotonic()
        packs = [
            Pack(name, self._keys_of(name, index), now)
            for name, index in zip(names, indexes, strict=True)
            if isinstance(index, bytes)
        ]
        with self._lock:
            self._table.add(packs)

    def _keys_of(self, name: PackName, index: bytes) -> tuple[OffloadKey, ...]:
        keys = keys_in(index)
        if keys is not None and name.blocks in (0, len(keys)):
            return keys
        self._context.log.warning(
            "tier %r (kvtier-fsspec): the object %s is damaged: its blocks are not served, and it is removed when its "
            "room is needed",
            self._context.name,
            self._path(name),
        )
        return ()

    def _path(self, name: PackName) -> str:
        return f"{self._context.namespace}/{PACKS}/{name.text}"


def _text(name: PackName) -> str:
    return name.text
