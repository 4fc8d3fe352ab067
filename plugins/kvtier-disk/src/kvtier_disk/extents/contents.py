"""Which blocks of a namespace this process knows, where they are, and in which order they leave.

Holds the keys in memory, so that nothing looks into the index to find a block. Decides which blocks are victims, by a
policy of the core's; never touches index or files. Safe from any thread; the lock is held for dictionary work only.
"""

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvtier_core.tier import Entry, EvictionPolicy, OffloadKey, begin_of

MINUTE_S = 60.0
"""How finely it is known after a restart when a block was used: a write for each use would cost too much."""
Pair = tuple[OffloadKey, int]
"""A key and the place its block is in."""


class Contents:
    """Keys and places. Until ``order`` was called, what is evicted is not up to the policy."""

    def __init__(self, policy: EvictionPolicy[Entry]) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._places: dict[OffloadKey, int] = {}
        self._held: dict[OffloadKey, int] = {}  # how often; a Counter takes ten times as long
        self._entries: dict[OffloadKey, Entry] = {}  # as the policy sees the blocks, once it knows them
        self._ordered = False  # whether the policy knows all keys; a million take their time
        self._since: list[OffloadKey] = []  # what came and went while it learns them
        # By which request (``Entry.chain``), since somebody asked; of the blocks that are there.
        self._used: dict[OffloadKey, int] = {}
        self._stored_late: dict[OffloadKey, int] = {}  # in a later minute than their request began

    def __len__(self) -> int:
        with self._lock:
            return len(self._places)

    def find(self, keys: Iterable[OffloadKey]) -> list[int | None]:
        """The place of each key, ``None`` where there is none."""
        with self._lock:
            return [self._places.get(key) for key in keys]

    def put(self, pairs: Iterable[Pair]) -> None:
        """Blocks stored by this process; where they were before does not count any more."""
        with self._lock:
            self._enter(pairs)

    def learn(self, pairs: Iterable[Pair]) -> tuple[list[OffloadKey], list[Pair]]:
        """Blocks stored by others: returns the keys that are new, and all pairs of those in more than one place."""
        fresh: list[OffloadKey] = []
        doubles: list[Pair] = []
        with self._lock:
            if not self._places and not self._ordered and not self._since:  # a million at the start
                pairs = list(pairs)
                self._places = dict(pairs)
                if len(self._places) == len(pairs):
                    return list(self._places), []
                self._places = {}
            for key, place in pairs:
                mine = self._places.get(key)
                if mine is None:
                    self._places[key] = place
                    fresh.append(key)
                elif mine != place:
                    doubles += [(key, mine), (key, place)]
            self._begin(
                fresh
            )  # at once: of one call the last leaves first, and they came in the order of prompts
        return fresh, doubles

    def lose(self, pairs: Iterable[Pair]) -> list[OffloadKey]:
        """These blocks are no longer in these places: returns the keys that are gone by that."""
        with self._lock:
            gone = [key for key, place in pairs if self._places.get(key) == place]
            for key in gone:
                self._leave(key)
            return gone

    def retain(self, pairs: Iterable[Pair]) -> list[OffloadKey]:
        """These are all the blocks there are: returns the keys that are gone by that."""
        with self._lock:
            now = dict(pairs)
            gone = [key for key, place in self._places.items() if now.get(key) != place]
            for key in gone:
                self._leave(key)
            return gone

    def use(self, keys: Iterable[OffloadKey]) -> None:
        """Count a use of each block."""
        with self._lock:
            self._count_use(keys)

    def arrange(self, chain: int, keys: Sequence[OffloadKey], depths: Sequence[int]) -> None:
        """Blocks come to a chain, at these depths in it: of one chain the deepest leaves first."""
        now = time.time()
        is_late = begin_of(chain, now) // MINUTE_S < now // MINUTE_S
        with self._lock:
            for key in keys:
                if key in self._used:
                    self._used[key] = max(self._used[key], chain)
                elif is_late and key in self._places:
                    self._stored_late[key] = chain
            arranged: list[Entry] = []
            for key, depth in zip(keys, depths, strict=True):
                entry = self._entries.get(key)
                if entry is not None:
                    entry.chain, entry.depth = chain, depth
                    arranged.append(entry)
            self._policy.release([entry for entry in arranged if not entry.pins])

    @contextmanager
    def holding(self, keys: Sequence[OffloadKey]) -> Iterator[None]:
        """Meanwhile these blocks are no victims; afterwards they have been used."""
        with self._lock:
            self._hold(keys, 1)
        try:
            yield
        finally:
            with self._lock:
                self._hold(keys, -1)
                self._count_use(keys)

    def take_used(self, now: float) -> tuple[dict[Pair, float], dict[Pair, float]]:
        """When the requests began that stored blocks late, and those that used blocks, since the last call."""
        with self._lock:
            late, used = (
                {(key, self._places[key]): begin_of(chain, now) for key, chain in marks.items()}
                for marks in (self._stored_late, self._used)
            )
            self._stored_late.clear()
            self._used.clear()
            return late, used

    def order(self, oldest_first: Iterable[OffloadKey]) -> None:
        """Let the policy know all blocks, in the order in which they were stored. Once. Cost: much for a million.

        The others go on meanwhile: the lock is held at the start and for what happened since.
        """
        with self._lock:
            assert not self._ordered, "ordered twice"
            known = dict.fromkeys(self._places)
            self._since = []
        told = dict.fromkeys(key for key in oldest_first if key in known)
        by_age = [*told, *(key for key in known if key not in told)]
        entries = {key: Entry.of(key) for key in by_age}
        self._policy.insert(list(reversed(entries.values())))  # of one call the last leaves first
        with self._lock:
            self._entries = entries
            since = list(dict.fromkeys(self._since))
            self._since.clear()
            self._ordered = True
            self._policy.remove([entries.pop(key) for key in since if key in entries])
            for key, held in self._held.items():
                if key in entries:
                    entries[key].pins = held
            self._insert([key for key in since if key in self._places])

    def victims(self, count: int) -> list[Pair]:
        """Up to *count* blocks that leave first; they are forgotten at once, so that nobody begins to read them."""
        with self._lock:
            if self._ordered:
                free = len(self._entries) - sum(key in self._entries for key in self._held)
                keys = [entry.key for entry in self._policy.evict(min(count, free), frozenset())]
                for key in keys:
                    del self._entries[key]
            else:  # right after the start of a large tier; any that nobody uses
                keys = list(itertools.islice((key for key in self._places if key not in self._held), count))
            leaving = [(key, self._places[key]) for key in keys]
            for key in keys:
                self._leave(key)
            return leaving

    # Under the lock.

    def _hold(self, keys: Sequence[OffloadKey], once: int) -> None:
        """Hold blocks *once* more, or once less."""
        for key in keys:
            held = self._held.get(key, 0) + once
            if held:
                self._held[key] = held
            else:
                del self._held[key]
            entry = self._entries.get(key)
            if entry is not None:
                entry.pins = held

    def _enter(self, pairs: Iterable[Pair]) -> None:
        fresh = []
        for key, place in pairs:
            if key not in self._places:
                fresh.append(key)
            self._places[key] = place
        self._begin(fresh)

    def _begin(self, fresh: Sequence[OffloadKey]) -> None:
        """Blocks that were not there before are in the order of eviction, or will be."""
        if self._ordered:
            self._insert(fresh)
        else:
            self._since += fresh

    def _insert(self, keys: Iterable[OffloadKey]) -> None:
        entries = [Entry.of(key) for key in keys]
        for entry in entries:
            entry.pins = self._held.get(entry.key, 0)
            self._entries[entry.key] = entry
        self._policy.insert(entries)

    def _count_use(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            if key in self._places:
                self._used.setdefault(key, 0)
        used = [self._entries[key] for key in dict.fromkeys(keys) if key in self._entries]
        for entry in used:
            entry.uses += 1
            entry.chain = entry.depth = 0  # whose use it was is told by `arrange`, if at all
        self._policy.release([entry for entry in used if not entry.pins])

    def _leave(self, key: OffloadKey) -> None:
        del self._places[key]
        self._used.pop(key, None)
        self._stored_late.pop(key, None)
        if not self._ordered:
            self._since.append(key)
        elif key in self._entries:
            self._policy.remove([self._entries.pop(key)])
