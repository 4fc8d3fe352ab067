"""One engine at a time keeps a namespace: it removes doubles and frees some room before others need it.

::

    <namespace>/keeper/<term, hex>.tmp   made by the engine that keeps during that half minute
    <namespace>/uses/<engine>.tmp        the packs that an engine used in the last hour, and when

The first engine that makes the object of a term is its keeper: nothing has to be renewed, given back or broken. When
the next term begins, another engine can follow a keeper that was killed. Two keepers at a time, where clocks differ or
the service can't make an object only once, do no harm: each removes what any engine may remove.

Decides when an engine keeps and what it tells others of its uses; what leaves is up to ``PackTable``.
"""

import threading
import time
from collections.abc import Mapping

from kvtier_core.tier import TierContext
from kvtier_fsspec.bucket import Bucket
from kvtier_fsspec.faults import StorageError
from kvtier_fsspec.packs import PackTable

TERM_S = 30.0
"""One engine keeps so long."""
_TOGETHER_S = 600.0
"""An engine that has stored within this time counts as being there."""
_FREE_SHARE = 32
"""The keeper leaves one of so many parts of the capacity free."""
_REMEMBERED_S = 3600.0
_MOST_USES = 10_000
"""Packs in one engine's list of uses, the last used of them: 300 kB."""
_LINE_BYTES = 64
"""Of one pack in that list, at most."""


def free_share(capacity: int | None) -> int:
    """Bytes of the capacity that the keeper leaves free."""
    return 0 if capacity is None else capacity // _FREE_SHARE


def text_of(uses: Mapping[str, float]) -> bytes:
    """A list of uses, the latest first: the pack's name and the second of its last use."""
    latest = sorted(uses.items(), key=lambda item: item[1], reverse=True)[:_MOST_USES]
    return "".join(f"{name} {int(when)}\n" for name, when in latest).encode()


def uses_in(content: bytes, now: float) -> dict[str, float]:
    """What a list says; lines that are no uses are passed over, and no use is later than *now*."""
    uses: dict[str, float] = {}
    for line in content.decode(errors="replace").splitlines():
        name, _, when = line.partition(" ")
        if when.isdecimal() and len(when) < 12:  # noqa: PLR2004 - digits of a time that can be meant
            uses[name] = min(float(when), now)
    return uses


class Keeper:
    """An engine's part in keeping. For one thread at a time."""

    def __init__(
        self, bucket: Bucket, table: PackTable, lock: threading.Lock, context: TierContext, writer: str
    ) -> None:
        """*lock* guards *table*. No I/O."""
        self._bucket = bucket
        self._table = table
        self._lock = lock
        self._context = context
        self._writer = writer
        self._term = -1
        self._keeps = False
        self._told_until = 0.0  # seconds since the epoch: the last use that was told
        self._learnt: dict[str, float] = {}  # lists of others, and when they were written
        self._told = ""

    def surplus(self) -> list[str]:
        """What this engine has to remove now, as the keeper: packs that don't count, and the longest unused ones.

        Cost: nothing as long as no other engine stores or nothing is to be done; else a request a term, and a listing
        for the keeper.
        """
        now, capacity = time.time(), self._context.capacity_bytes
        free = free_share(capacity)
        with self._lock:
            if not self._table.others_stored(self._writer, now - _TOGETHER_S):
                return []
            superseded = self._table.superseded()
            is_full = capacity is not None and self._table.bytes + free > capacity
        if not (superseded or is_full) or not self._is_keeper(now):
            return []
        with self._lock:
            self._table.drop(superseded)
            going = self._table.make_room(free, now)
        return [*superseded, *(pack.name.text for pack in going)]

    def share_uses(self) -> None:
        """Tell others which packs were used here, and learn which they used. Raises ``StorageError``.

        Cost: a listing, and a request for each engine that used any since the last time, this one among them.
        """
        now = time.time()
        with self._lock:
            uses = self._table.used_here(now - _REMEMBERED_S)
        folder = f"{self._context.namespace}/uses"
        mine = f"{folder}/{self._writer}.tmp"
        if max(uses.values(), default=0.0) > self._told_until:
            self._bucket.write(mine, text_of(uses))
            self._told_until = max(uses.values())
        listed = {one.path: one.time for one in self._bucket.below(folder) if one.path != mine}
        new = [path for path, when in listed.items() if self._learnt.get(path) != when]
        for content in self._bucket.heads(new, _MOST_USES * _LINE_BYTES):
            if isinstance(content, bytes):
                with self._lock:
                    self._table.used_elsewhere(uses_in(content, now))
        self._learnt = listed
        self._bucket.remove([path for path, when in listed.items() if when < now - 2 * _REMEMBERED_S])

    def _is_keeper(self, now: float) -> bool:
        term = int(now // TERM_S)
        if term == self._term:
            return self._keeps
        self._term, self._keeps = term, False
        folder = f"{self._context.namespace}/keeper"
        path = f"{folder}/{term:08x}.tmp"
        try:
            self._keeps = self._bucket.write_new(path, self._writer.encode())
        except StorageError as error:  # each engine makes room for itself
            if str(error) != self._told:
                self._told = str(error)
                self._context.log.info(
                    "tier %r (kvtier-fsspec): no engine can be told from others as the keeper of %s (%s): each removes "
                    "what it needs the room of",
                    self._context.name,
                    self._context.namespace,
                    error,
                )
            return False
        if self._keeps:
            self._bucket.remove([one.path for one in self._bucket.below(folder) if one.path < path])
        return self._keeps
