"""Keeps what a process knows of its namespace in step with the index: what others stored and removed, and what is old.

Decides nothing: which blocks leave is up to ``Upkeep`` and the policy, and when to look to who calls.
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice

from kvtier_core.tier import OffloadKey
from kvtier_disk.extents.contents import Pair
from kvtier_disk.extents.full_disk import full_disk_waits
from kvtier_disk.extents.store import BlockStore
from kvtier_disk.extents.tables import CHUNK, chunks

_EXPIRED_PARTS = 64  # of CHUNK blocks, whose slots one look frees: that takes up to a second


class News:
    """What happened to the blocks of one store, told to its contents and to the core."""

    def __init__(
        self,
        blocks: BlockStore,
        ttl: float | None,
        *,
        report_stored: Callable[[Sequence[OffloadKey]], None],
        report_evicted: Callable[[Sequence[OffloadKey]], None],
    ) -> None:
        self._blocks = blocks
        self._ttl = ttl
        self._report_stored = report_stored
        self._report_evicted = report_evicted
        # When blocks past their time were last looked for: what is there may be from a time ahead of the first look.
        self._last_look = float("inf")

    def expire(self, now: float) -> None:
        """Serve no block that is past its time any more, and free the slots of as many as one look can.

        In parts, each of which holds others up for little. Raises ``OSError``.
        """
        if self._ttl is None:
            return
        opened = self._blocks.opened
        may_change = not opened.index.database.read_only
        if may_change and now < self._last_look:
            opened.index.set_times_back(opened.namespace, now)
        self._last_look = now
        old = opened.index.pairs_of(opened.namespace, before=now - self._ttl)
        parts = iter(lambda: list(islice(old, CHUNK)), [])
        for number, pairs in enumerate(parts):
            with self._blocks.lock:
                if may_change and number < _EXPIRED_PARTS:
                    opened.index.forget(opened.namespace, opened.owner, pairs)
                self._report_evicted(opened.contents.lose(pairs))

    def catch_up(self) -> None:
        """Learn what others have changed since the last time. Raises ``OSError``."""
        blocks, opened = self._blocks, self._blocks.opened
        with blocks.lock:
            version = self._version()
            changes = opened.index.changes_since(opened.seen, opened.namespace, opened.owner)
            if changes is None:
                self.learn_all()
                return
            opened.seen, news = changes
            opened.version = version
            doubles: list[Pair] = []
            for stored, pairs in news:
                if stored:
                    fresh, more = opened.contents.learn(pairs)
                    doubles += more
                    self._report_stored(fresh)
                else:
                    self._report_evicted(opened.contents.lose(pairs))
            self._settle(doubles)

    def learn_all(self) -> None:
        """Learn all that the namespace holds. Raises ``OSError``. Cost: a look at each of its slots."""
        blocks, opened = self._blocks, self._blocks.opened
        with blocks.lock:
            opened.version = self._version()
            opened.seen = opened.index.last_change()
            since = float("-inf") if self._ttl is None else time.time() - self._ttl
            pairs = list(opened.index.pairs_of(opened.namespace, since))
            if len(opened.contents):
                self._report_evicted(opened.contents.retain(pairs))
            fresh, doubles = opened.contents.learn(pairs)
            self._report_stored(fresh)
            self._settle(doubles)

    def _version(self) -> int:
        """The index's version now. Waits for a process that is about to commit, as what follows does."""
        database = self._blocks.opened.index.database
        with database.reading():
            return database.version()

    def _settle(self, doubles: Sequence[Pair]) -> None:
        """Let each block that several processes stored have one place. Asks the index: some may be free by now."""
        opened = self._blocks.opened
        if not doubles or opened.index.database.read_only:
            return
        places: dict[OffloadKey, set[int]] = {}
        for key, place in doubles:
            places.setdefault(key, set()).add(place)
        for key, known in zip(places, opened.contents.find(places), strict=True):
            if known is not None:  # not yet among them: learned after another place of this key was removed
                places[key].add(known)
        with full_disk_waits():
            kept: list[Pair] = []
            for keys in chunks(list(places)):
                some = {key: places[key] for key in keys}
                kept += opened.index.keep_one(opened.namespace, opened.owner, some)
            before = opened.contents.find([key for key, _ in kept])
            opened.contents.put(kept)
            self._report_stored([key for (key, _), place in zip(kept, before, strict=True) if place is None])
