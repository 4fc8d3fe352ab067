"""The blocks of one namespace in one root, as one process stores and loads them.

Decides the order that makes a crash harmless: claim slots, write rows, sync once, publish; and when a row read is not
the block that was meant. Room comes from ``Upkeep``. Safe from any thread.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from kvtier_core.tier import OffloadKey, Sealer
from kvtier_disk.extents.advice import bare
from kvtier_disk.extents.contents import Contents, Pair
from kvtier_disk.extents.extent_files import TAIL_BYTES, ExtentFiles
from kvtier_disk.extents.form import MAX_KEY_BYTES, extent_of, slot_of
from kvtier_disk.extents.index import Index
from kvtier_disk.extents.membership import Membership
from kvtier_disk.extents.statements import index_gone

Outcome = bool | Exception
_AHEAD, _AHEAD_OF = 15, 32
"""So many times as many blocks as have to go are evicted as well, at most one of so many that there are: with many free
slots at a time batches find neighbouring ones. With few, every batch inherits the pieces of two others."""
_MOST_AHEAD = 1024
"""A claim is one transaction, which others wait for: scattered slots of more would outgrow the journal."""


@dataclass(kw_only=True)
class Opened:
    """An open namespace. ``member`` changes when the index is made anew, or the root can be written again."""

    member: Membership
    contents: Contents
    seen: int = 0
    """The number of the last change that ``contents`` knows of."""
    version: int = 0
    """The index's version at that moment: while it is the same, no other process has changed anything."""

    @property
    def namespace(self) -> int:
        """The namespace's number."""
        return self.member.namespace.id

    @property
    def index(self) -> Index:
        """The index in use."""
        return self.member.index

    @property
    def owner(self) -> int:
        """This process's number in the index."""
        return self.member.owner

    @property
    def files(self) -> ExtentFiles:
        """The namespace's extents."""
        return self.member.files


class Claim(NamedTuple):
    """Slots that are ours to write into, by the index of *member*: another index knows nothing of them."""

    member: Membership
    places: list[int]


class BlockStore:
    """Stores, loads and forgets blocks.

    *make_room* claims slots, and sees to it that there are some; *forget_extents* takes away what has been lost.
    """

    def __init__(
        self,
        opened: Opened,
        sealer: Sealer,
        make_room: Callable[[int], Claim],
        forget_extents: Callable[[Sequence[int]], None],
        *,
        report_stored: Callable[[Sequence[OffloadKey]], None],
        report_evicted: Callable[[Sequence[OffloadKey]], None],
        ttl: float | None = None,
    ) -> None:
        self.opened = opened
        self._ttl = ttl
        self.lock = threading.RLock()
        """Held while index, contents and the core's belief change together."""
        self._sealer = sealer
        self._make_room = make_room
        self._forget_extents = forget_extents
        self._report_stored = report_stored
        self._report_evicted = report_evicted
        self._lost_claims: list[Claim] = []  # not written, and not given back yet
        self.was_used = False
        self.refusal: OSError | None = None
        """Why nothing can be stored or deleted, while that is so."""

    # Stores.

    def store(self, keys: Sequence[OffloadKey], rows: Sequence[memoryview]) -> list[Outcome]:
        """Store each; True or what went wrong, in order. What raises here failed for all."""
        self._check_writable()
        outcomes: list[Outcome | None] = [_problem_of(key) for key in keys]
        waiting = [index for index, outcome in enumerate(outcomes) if outcome is None]
        self.was_used = True
        while waiting:
            try:
                self.give_back_claims()
                claim = self._make_room(len(waiting))
            except OSError as error:
                kept = bare(error)
                for index in waiting:
                    outcomes[index] = kept
                break
            batch, waiting = waiting[: len(claim.places)], waiting[len(claim.places) :]
            done = self._write([keys[index] for index in batch], [rows[index] for index in batch], claim)
            for index, outcome in zip(batch, done, strict=True):
                outcomes[index] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    def claim(self, count: int, *, evict: bool) -> Claim:
        """Claim up to *count* free slots, and with *evict* those of victims where there are too few.

        Raises ``OSError``.
        """
        opened = self.opened
        if not evict:
            member = opened.member
            return Claim(member, member.index.claim(member.namespace.id, member.owner, count))
        victims: list[Pair] = []

        def choose(missing: int) -> list[Pair]:
            if len(victims) > _MOST_AHEAD:
                return []
            ahead = min(_AHEAD * missing, len(opened.contents) // _AHEAD_OF, _MOST_AHEAD)
            chosen = opened.contents.victims(missing + ahead)
            victims.extend(chosen)
            return chosen

        with self.lock:
            try:
                places = opened.index.claim(opened.namespace, opened.owner, count, choose)
            except OSError:
                opened.contents.put(victims)  # they are still there
                raise
            self._report_evicted([key for key, _ in victims])
            return Claim(opened.member, places)

    def _write(self, keys: Sequence[OffloadKey], rows: Sequence[memoryview], claim: Claim) -> list[Outcome]:
        """Write rows into claimed places, sync them, and only then publish them."""
        now = time.time()
        places = claim.places
        failed = self._write_rows(keys, rows, claim, now)
        written = [index for index in range(len(places)) if index not in failed]
        published: list[bool] = []
        if written:
            try:
                stored = [(keys[index], places[index]) for index in written]
                published = self._publish(claim.member, stored, now)
            except OSError as error:
                failed.update(dict.fromkeys(written, bare(error)))
                written = []
        if failed:
            with self.lock:
                self._lost_claims.append(Claim(claim.member, [places[index] for index in failed]))
            with suppress(OSError):  # tried again before the next claim
                self.give_back_claims()
        lost = OSError(
            errno.ESTALE,
            "the slot was taken away while it was written: its extent went, the index was made anew, or another process"
            " took this one for dead",
        )
        outcomes: dict[int, Outcome] = dict(failed)
        self.forget_lost_extents()
        outcomes |= {index: done or lost for index, done in zip(written, published, strict=True)}
        return [outcomes[index] for index in range(len(places))]

    def _write_rows(
        self, keys: Sequence[OffloadKey], rows: Sequence[memoryview], claim: Claim, now: float
    ) -> dict[int, OSError]:
        """Write and sync; returns what went wrong, by index."""
        files, places = claim.member.files, claim.places
        if claim.member is not self.opened.member:
            return dict.fromkeys(range(len(places)), index_gone(claim.member.index.database.path))
        failed: dict[int, OSError] = {}
        by_extent: dict[int, list[int]] = {}
        for begin, end in _runs(places):
            extent = extent_of(places[begin])
            try:
                files.write(extent, slot_of(places[begin]), keys[begin:end], rows[begin:end], now)
                by_extent.setdefault(extent, []).extend(range(begin, end))
            except OSError as error:
                failed.update(dict.fromkeys(range(begin, end), bare(error)))
        for extent, indexes in by_extent.items():
            try:
                files.sync(extent)
            except OSError as error:
                failed.update(dict.fromkeys(indexes, bare(error)))
        return failed

    def _publish(self, member: Membership, stored: Sequence[Pair], now: float) -> list[bool]:
        opened = self.opened
        with self.lock:
            if opened.member is not member:
                return [False] * len(stored)
            before = opened.contents.find([key for key, _ in stored])
            replaced = [
                (key, old)
                for (key, place), old in zip(stored, before, strict=True)
                if old is not None and old != place  # which another process had freed
            ]
            published = opened.index.publish(opened.namespace, opened.owner, stored, replaced, now)
            there = [pair for pair, done in zip(stored, published, strict=True) if done]
            opened.contents.put(there)
            # In the order of all reports: others may have stored and removed these while they were written.
            self._report_stored([key for key, _ in there])
        return published

    def give_back_claims(self) -> None:
        """Give back what was claimed and could not be written. Raises ``OSError``."""
        with self.lock:
            member = self.opened.member
            places = [
                place for claim in self._lost_claims if claim.member is member for place in claim.places
            ]
            if places:
                member.index.unclaim(member.owner, places)
            self._lost_claims.clear()

    # Loads.

    def load(self, keys: Sequence[OffloadKey], rows: Sequence[memoryview]) -> list[Outcome]:
        """Fill each; True, False where it is absent, or what went wrong."""
        contents = self.opened.contents
        self.was_used = True
        outcomes: list[Outcome] = [False] * len(keys)
        tried: list[int | None] = [None] * len(keys)
        with contents.holding(keys):
            # A block may move meanwhile: it was there twice, or the index was made anew. It is read where it is now.
            while True:
                places = contents.find(keys)
                due = [
                    index
                    for index, place in enumerate(places)
                    if outcomes[index] is False and place not in (None, tried[index])
                ]
                if not due:
                    break
                tried = places
                read = self._read(
                    [keys[index] for index in due],
                    [rows[index] for index in due],
                    [place for index in due if (place := places[index]) is not None],
                )
                for index, outcome in zip(due, read, strict=True):
                    outcomes[index] = outcome
        self.forget_lost_extents()
        return outcomes

    def _read(
        self, keys: Sequence[OffloadKey], rows: Sequence[memoryview], places: Sequence[int]
    ) -> list[Outcome]:
        """Fill each from its place; False where it is not there any more."""
        outcomes: list[Outcome] = [False] * len(keys)
        known = sorted((place, index) for index, place in enumerate(places))
        for begin, end in _runs([place for place, _ in known]):
            run = known[begin:end]
            place = run[0][0]
            read = self.opened.files.read(extent_of(place), slot_of(place), [rows[index] for _, index in run])
            for (_, index), outcome in zip(run, read, strict=True):
                outcomes[index] = outcome
        self._refuse_gone(keys, rows, places, outcomes)
        return outcomes

    def _refuse_gone(
        self,
        keys: Sequence[OffloadKey],
        rows: Sequence[memoryview],
        places: Sequence[int],
        outcomes: list[Outcome],
    ) -> None:
        """Make absent what another process has evicted, or begun to write over, by now, and what is past its time.

        None of it is a fault. Who has a time to live asks the index at every load: ages are nowhere else.
        """
        gone = [
            index
            for index, outcome in enumerate(outcomes)
            if outcome is False
            or (
                outcome is True and self._sealer.names(keys[index], bytes(rows[index][-TAIL_BYTES:])) is False
            )
        ]
        now = self._held_now(places)
        if now is not None:
            gone += [index for index, pair in enumerate(zip(keys, places, strict=True)) if pair not in now]
        for index in gone:
            outcomes[index] = False
        if gone:
            self._lose([(keys[index], places[index]) for index in dict.fromkeys(gone)])

    def _held_now(self, places: Sequence[int]) -> set[Pair] | None:
        """What the index says that *places* hold; ``None`` where nobody has changed it, or it can't be asked.

        Without its word the proofs decide alone, and what was recycled counts as damaged. Raises ``OSError`` where only
        the index knows ages.
        """
        opened = self.opened
        if self._ttl is not None:
            return opened.index.pairs_at(places, time.time() - self._ttl)
        database = opened.index.database
        try:
            if database.read_only or database.version() == opened.version:
                return None
            return opened.index.pairs_at(places)
        except OSError:
            return None

    def forget_lost_extents(self) -> None:
        """Take away the extents that turned out to be lost. Raises no error: who uses them next finds them again."""
        lost = self.opened.files.take_lost()
        if lost and self.refusal is None:
            with suppress(OSError):
                self._forget_extents(lost)

    def _lose(self, pairs: Sequence[Pair]) -> None:
        opened = self.opened
        with self.lock:
            opened.contents.lose(pairs)
            if not opened.index.database.read_only:
                with suppress(OSError):  # a slot that holds another block stays; the next load finds it again
                    opened.index.forget(opened.namespace, opened.owner, pairs)

    # The rest.

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Free the slots of these blocks. Raises ``OSError``."""
        self._check_writable()
        opened = self.opened
        with self.lock:
            places = opened.contents.find(keys)
            pairs = [(key, place) for key, place in zip(keys, places, strict=True) if place is not None]
            opened.index.forget(opened.namespace, opened.owner, pairs)
            opened.contents.lose(pairs)

    def _check_writable(self) -> None:
        refusal = self.refusal
        if refusal is not None:
            raise OSError(refusal.errno, refusal.strerror, refusal.filename)


def _problem_of(key: OffloadKey) -> Exception | None:
    if 0 < len(key) <= MAX_KEY_BYTES:
        return None
    return ValueError(f"a key must have 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Index ranges of neighbouring places in one extent; *places* are sorted."""
    begin = 0
    for index in range(1, len(places)):
        place = places[index]
        if place != places[index - 1] + 1 or not slot_of(place):
            yield begin, index
            begin = index
    if places:
        yield begin, len(places)
