"""Keeps a namespace's process in step with the others, and its root within its bounds.

Decides when: room is made when a store finds none, everything else happens in ``follow``, which the core calls from
time to time. What has to go is decided by ``room``; what is where, by the index.
"""

import errno
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvtier_core.tier import OffloadKey, format_size
from kvtier_disk.extents.bounds import Bounds, bytes_of_disk, shape_for
from kvtier_disk.extents.census import SLOT_BYTES
from kvtier_disk.extents.contents import MINUTE_S
from kvtier_disk.extents.database import Snapshot
from kvtier_disk.extents.form import Shape
from kvtier_disk.extents.full_disk import cut, cut_surplus, full_disk_waits, is_out_of_room, join
from kvtier_disk.extents.membership import Membership
from kvtier_disk.extents.news import News
from kvtier_disk.extents.place import NOT_WRITABLE, served_only
from kvtier_disk.extents.room import Census, Grow, Recycle, Take, find_room, surplus
from kvtier_disk.extents.root import Root
from kvtier_disk.extents.statements import IndexDamagedError
from kvtier_disk.extents.store import BlockStore, Claim, Outcome

_REAP_EVERY_S = 10.0
_ORDERED_AT_ONCE = 10_000  # blocks whose order is learned before the tier is open: that takes some 50 ms


class Upkeep:
    """Room, changes of others, ages, and an index that has to be made anew."""

    _news: News  # since it was attached

    def __init__(
        self,
        root: Root,
        bounds: Bounds,
        description: Mapping[str, Any],
        *,
        may_write: bool,
        report_stored: Callable[[Sequence[OffloadKey]], None],
        report_evicted: Callable[[Sequence[OffloadKey]], None],
    ) -> None:
        self._root = root
        self._bounds = bounds
        self._description = description
        self._may_write = may_write
        self._report_stored = report_stored
        self._report_evicted = report_evicted
        self._store: BlockStore | None = None
        self._former: Membership | None = None
        self._room_lock = threading.Lock()  # one thread makes room; the others find some afterwards
        self._is_full = False  # as of the last look: blocks have to go, no extent can come
        # The first `follow` belongs to the start, which a million blocks must not hold up.
        self._is_started = False
        self._is_ordered = False
        self._next_reap = 0.0
        self._last_mark = time.time()

    def attach(self, store: BlockStore) -> None:
        """The store this is for."""
        self._store = store
        self._news = News(
            store,
            self._bounds.ttl,
            report_stored=self._report_stored,
            report_evicted=self._report_evicted,
        )

    @property
    def _blocks(self) -> BlockStore:
        assert self._store is not None, "used before it was attached"
        return self._store

    # Room.

    def make_room(self, count: int) -> Claim:
        """Claim up to *count* slots. Raises ``OSError``, ``ENOSPC`` when there are none and no way to get some."""
        claim = self._blocks.claim(count, evict=self._is_full)
        if claim.places:
            return claim
        with self._room_lock:
            evictable = sys.maxsize
            while True:
                claim = self._blocks.claim(count, evict=self._is_full)
                if claim.places:
                    return claim
                evictable = self._widen(evictable)

    def _widen(self, evictable: int) -> int:
        """Bring one more extent about, or find out that blocks have to go: how many there are that could.

        Raises ``ENOSPC`` when there are none, or as many as before. A turn that evicts without a slot to show for it
        met blocks whose extents others have taken: those behind them may still be there.
        """
        opened = self._blocks.opened
        self._root.check_in_use(opened.index)
        census = opened.index.census(self._root.journal_bytes)
        shape = self._next_shape(census)
        match self._choose(census, shape):
            case Grow():
                self._grow(shape)
            case Take(extents):
                if not self._take(extents):
                    raise self._no_room(census)
            case Recycle():
                self._news.catch_up()
                blocks = len(opened.contents)
                if not blocks or (self._is_full and blocks >= evictable):
                    raise self._no_room(census)
                self._is_full = True
                return blocks
        return evictable

    def _next_shape(self, census: Census) -> Shape:
        namespace = self._blocks.opened.member.namespace
        return shape_for(
            namespace.row_bytes,
            self._bounds,
            self._root.journal_bytes,
            held=census.bytes_by_namespace()[namespace.id],
            disk_bytes=bytes_of_disk(self._root.path),
        )

    def _choose(self, census: Census, shape: Shape) -> Grow | Take | Recycle:
        new_bytes = shape.file_bytes + shape.slots * SLOT_BYTES
        limits = self._bounds.limits_at(self._root.path)
        return find_room(census, limits, self._blocks.opened.namespace, new_bytes, time.time())

    def _grow(self, shape: Shape) -> None:
        """Make an extent, unless others have taken the room for it meanwhile."""
        opened = self._blocks.opened
        with self._root.keeping(opened.index):  # an older index would number two extents alike
            # Counted again where nobody else makes one: two that count at once would both find the last room.
            if self._choose(opened.index.census(self._root.journal_bytes), shape) != Grow():
                return
            extent = opened.index.begin_extent(opened.namespace, opened.owner, shape.slots, shape.file_bytes)
            try:
                opened.files.make(extent, shape)
            except FileExistsError:
                opened.index.drop_extent(extent)  # somebody's file: the next turn takes the next number
                return
            except BaseException:
                opened.index.drop_extent(extent)
                raise
            if not opened.index.finish_extent(extent):
                opened.files.remove(extent)

    def forget_extents(self, extents: Sequence[int]) -> None:
        """These extents are lost: nothing is found or stored in them any more. Raises ``OSError``."""
        opened = self._blocks.opened
        ready = {row.id for row in opened.index.extents() if row.is_ready}
        lost = [opened.files.path_of(extent) for extent in extents if extent in ready]
        if lost:  # and not only removed by another process that made room
            self._root.tell_lost(lost)
        self._take(extents, lost=True)

    def _take(self, extents: Sequence[int], *, lost: bool = False) -> bool:
        """Remove these extents; whether one of them went. One that is written to stays, unless it is *lost*."""
        opened = self._blocks.opened
        rows = {row.id: row for row in opened.index.extents()}
        taken = [
            self._root.take_away(opened.index, rows[id_], owner=None if lost else opened.owner)
            for id_ in extents
            if id_ in rows
        ]
        self._news.catch_up()
        return any(taken)

    def _no_room(self, census: Census) -> OSError:
        limits = self._bounds.limits_at(self._root.path)
        capacity = "no capacity" if limits.capacity is None else format_size(limits.capacity)
        return OSError(
            errno.ENOSPC,
            f"no room: {format_size(census.total_bytes)} of {capacity} in use; the disk has"
            f" {format_size(limits.free_bytes)} free, and {format_size(limits.min_free)} (min_free) stay free:"
            " raise capacity, lower min_free, or set root to a larger file system",
        )

    # From time to time.

    def start(self) -> None:
        """Learn everything the namespace holds, and make the root fit its limits. Raises ``OSError``."""
        self._mended(self._start)

    def _start(self) -> None:
        self._news.learn_all()
        if self._blocks.refusal is None:
            with full_disk_waits():
                self.give_back()
            self._warn_if_nothing_fits()
        if len(self._blocks.opened.contents) <= _ORDERED_AT_ONCE:
            self._order()

    def _warn_if_nothing_fits(self) -> None:
        """Say at the start what the first store would say: blocks that are not there can't make room."""
        census = self._blocks.opened.index.census(self._root.journal_bytes)
        if not census.extents and isinstance(self._choose(census, self._next_shape(census)), Recycle):
            self._root.warn_once("no room", f"nothing can be stored: {self._no_room(census).strerror}")

    def follow(self) -> None:
        """Learn what changed, and put in order what has to be. Raises ``OSError``."""
        self.end_former()
        if self._blocks.refusal is not None and not self._blocks.opened.index.database.read_only:
            self._look_again()
        database = self._blocks.opened.index.database
        if isinstance(database, Snapshot):
            self._follow_reading(database)
            return
        self._check_index()
        self._mended(self._follow)

    def heed(self, outcomes: Sequence[Outcome]) -> None:
        """Store no more where these stores failed because nothing may be written any more. Says so once."""
        refused = any(isinstance(outcome, OSError) and outcome.errno in NOT_WRITABLE for outcome in outcomes)
        if not refused or self._blocks.refusal is not None:
            return
        problem = self._root.why_not_written(self._blocks.opened.member.namespace.name)
        if problem is not None and problem.errno in NOT_WRITABLE:
            self._blocks.refusal = problem
            self._root.warn_once("unwritable", served_only(self._root.path, problem))

    def _follow(self) -> None:
        blocks, opened = self._blocks, self._blocks.opened
        now = time.time()
        with full_disk_waits():
            self._root.heal_directory(opened.member, self._description)
        opened.files.look_after_open()
        blocks.forget_lost_extents()
        self._news.catch_up()
        self._is_full = False
        if not self._is_ordered and self._is_started:
            self._order()
        self._is_started = True
        with full_disk_waits():
            self.give_back()  # before all else: the rest takes room
            if blocks.was_used:
                opened.index.mark_used(opened.namespace, now)
                blocks.was_used = False
            blocks.give_back_claims()
            self._mark_used(now)
            self._news.expire(now)
            self._clear()

    def _mark_used(self, now: float) -> None:
        """Write down which blocks were used, once a minute: after a restart they leave in that order."""
        if abs(now - self._last_mark) >= MINUTE_S:
            self._last_mark = now
            late, used = self._blocks.opened.contents.take_used(now)
            self._blocks.opened.index.mark_blocks_used(late, are_new=True)
            self._blocks.opened.index.mark_blocks_used(used, are_new=False)

    def end(self) -> None:
        """The tier closes: write down what was used last, where that can be written."""
        self.end_former()
        if not self._blocks.opened.index.database.read_only:
            self._last_mark = 0.0
            with suppress(OSError):  # after the next start some blocks look less used
                self._mark_used(time.time())

    def _clear(self) -> None:
        """Remove what the dead have left, now and then. By a clock that is never put back."""
        now = time.monotonic()
        if now < self._next_reap:
            return
        self._next_reap = now + _REAP_EVERY_S
        index = self._blocks.opened.index
        self._root.signs.reap(index, self._blocks.opened.member)
        if index.empty_namespaces() or not all(row.is_ready for row in index.extents()):
            with self._root.keeping(index):
                self._root.clear(index)

    def _order(self) -> None:
        """Let the policy know what is there."""
        opened = self._blocks.opened
        opened.contents.order(key for key, _ in opened.index.by_use(opened.namespace, MINUTE_S))
        self._is_ordered = True

    def give_back(self) -> None:
        """Remove what is beyond the capacity or the free-space floor. Raises ``OSError``."""
        opened = self._blocks.opened
        limits = self._bounds.limits_at(self._root.path)
        census = opened.index.census(self._root.journal_bytes)
        going = surplus(census, limits, opened.namespace)
        if going:
            try:
                self._take(going)
            except OSError as error:
                if not is_out_of_room(error):
                    raise
                cut(self._root, opened.index, going)
                self._take(going, lost=True)
            census = opened.index.census(self._root.journal_bytes)
        if census.wants_compact(limits):
            opened.index.database.compact()

    def remove_namespace(self) -> None:
        """Remove everything of the namespace. Raises ``OSError``."""
        opened = self._blocks.opened
        self._take([row.id for row in opened.index.extents() if row.namespace == opened.namespace])
        self._root.remove_directory(opened.member.namespace.name)

    # An index that is not what it was.

    def _mended(self, act: Callable[[], None]) -> None:
        """Do *act*; where it meets a damaged index, make that anew and do it again. Raises ``OSError``."""
        try:
            act()
        except IndexDamagedError:
            if self._blocks.opened.index.database.read_only:
                raise
            self._check_index()
            act()

    def _check_index(self) -> None:
        """Change over to another index if this one is damaged, or another process has made one anew."""
        index = self._blocks.opened.index
        self._check_root()
        damage = index.database.damage
        if damage is None and self._root.is_in_use(index):
            return
        if damage is not None:
            with self._root.exclusively():
                if self._root.is_in_use(index):
                    self._root.rebuild(damage).database.close()
        self._rejoin()

    def _check_root(self) -> None:
        """Raises ``OSError`` where the root is gone: in its empty place nothing may be made."""
        if not self._root.home.is_there():
            raise OSError(errno.ENOENT, "the root is gone, or not mounted", str(self._root.path))

    def _rejoin(self) -> None:
        old = self._blocks.opened.member
        namespace = old.namespace
        self._change_over(
            join(self._root, self._bounds, namespace.name, namespace.row_bytes, self._description)
        )
        self._blocks.refusal = None

    def _change_over(self, member: Membership) -> None:
        blocks, opened = self._blocks, self._blocks.opened
        self.end_former()
        with blocks.lock:
            # Loads and stores that began with it are still under way: it ends at the next look.
            self._former, opened.member = opened.member, member
            self._news.learn_all()

    def end_former(self) -> None:
        """Close the index that was in use before the last change-over. Raises ``OSError``."""
        former, self._former = self._former, None
        if former is not None:
            former.end()

    # Where nothing can be written.

    def _follow_reading(self, database: Snapshot) -> None:
        """Look whether the index has changed, and whether the root can be written by now."""
        self._check_root()
        if self._may_write and (self._can_be_written() or self._sheds()):
            # SQLite shares what it knows of a file within a process: one reader that may not write spoils the writer.
            database.close()
            try:
                self._rejoin()
            except OSError as error:
                self._blocks.refusal = error
                self._look_again()
                return
            self._root.warn_once("writable", f"{self._root.path} can be written again: blocks are stored")
        elif database.is_stale:
            self._look_again()
        self._news.expire(time.time())

    def _can_be_written(self) -> bool:
        return self._root.why_not_written(self._blocks.opened.member.namespace.name) is None

    def _sheds(self) -> bool:
        """On a full disk: whether room could be given back, so that the index can be opened."""
        blocks = self._blocks
        return (
            blocks.refusal is not None
            and is_out_of_room(blocks.refusal)
            and cut_surplus(self._root, self._bounds, blocks.opened.index, blocks.opened.namespace)
        )

    def _look_again(self) -> None:
        old = self._blocks.opened.member.namespace
        member = self._root.look_in(old.name, old.row_bytes)
        if member is not None:
            self._change_over(member)
