"""What one tier instance has to do and is believed to hold, under one lock: decides, and returns what to call.

No method calls the tier, and only ``next_units`` waits. The owner makes the calls in between and reports how they
ended. Lock order: this lock, then the presence set's.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtier_core.errors import PluginError
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking.calls import CallOutcome, Fault, Held
from kvtier_core.manager.blocking.contents import Contents
from kvtier_core.manager.blocking.work import Kind, Limit, Pace, Unit, WorkQueue
from kvtier_core.manager.port import TierHome
from kvtier_core.manager.presence import PresenceSet
from kvtier_core.values import BlockInfo, TierEvent

_LEAST_PAUSE_S = 1.0
"""Blocks that have become too old are looked for no oftener."""
_MAX_NEW_CHAINS = 10_000
"""Requests remembered whose next blocks nobody else has stored: one that is forgotten costs a question."""


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """What to do for some stores: delete the *victims*, then store each unit without an outcome."""

    outcomes: list[CallOutcome | None]
    victims: list[OffloadKey]
    claimed: list[OffloadKey]
    """Those victims that no unit of the plan is working on already."""
    to_ask: list[Unit]
    """Those units without an outcome whose blocks others may have stored: the tier is asked first."""


class InstanceState:
    """Queue and contents of one tier instance. Safe from any thread."""

    def __init__(
        self,
        name: str,
        contents: Contents,
        batch: Mapping[Kind, Limit],
        home: TierHome,
        *,
        max_storing: int,
        marks: bool,
        asks: bool,
    ) -> None:
        """At most *max_storing* calls store at a time: where there are more threads, no load waits for one.

        *marks*: whether the tier remembers over a restart when blocks were used. *asks*: whether it is asked, before a
        store, if others have stored the block.
        """
        self._marks = marks
        self._asks = asks
        self._new_chains: OrderedDict[int, None] = OrderedDict()  # by what was asked for last
        self._name = name
        self._contents = contents
        self._pace = Pace()
        self._batch: dict[Kind, Limit | Pace] = {**batch, Kind.LOOKUP: self._pace}
        self._home = home
        self._max_storing = max_storing
        self._storing = 0
        self._lock = threading.Lock()
        self._work_ready = threading.Condition(self._lock)
        self._queue = WorkQueue()
        self._condemned: set[OffloadKey] = set()  # to be deleted, unless stored anew before
        self._appeared: set[OffloadKey] = set()
        """Reported stored while a call on them runs: its answer may be older."""
        self._retired = False

    @property
    def presence(self) -> PresenceSet | None:
        """The presence set while it alone answers lookups, else ``None``."""
        return self._contents.presence if self._contents.answers else None

    # Work coming in and going out.

    def put(self, units: Sequence[Unit]) -> bool:
        """Queue units. False, and they are not queued, when the instance is retired."""
        with self._lock:
            if not self._retired:
                self._put(units)
            return not self._retired

    @property
    def lookup_pace(self) -> int:
        """How many keys one call of ``contains`` is to ask about."""
        with self._lock:
            return self._pace.keys

    def looked_up(self, keys: int, seconds: float) -> None:
        """A call of ``contains`` that asked about so many keys took so long."""
        with self._lock:
            self._pace.note(keys, seconds)

    def next_units(self) -> list[Unit]:
        """Wait for work; the units belong to the caller until ``done``. Empty once the instance is retired."""
        with self._lock:
            while not self._retired:
                now = self._home.clock()
                units = self._queue.take(self._batch, now, stores=self._storing < self._max_storing)
                if units:
                    self._storing += units[0].kind is Kind.STORE
                    return units
                due = self._queue.next_due
                self._work_ready.wait(None if due is None else max(0.0, due - now))
            return []

    def done(self, units: Sequence[Unit]) -> None:
        """The calls for these units have ended. A load is a use of its block; a lookup or a delete is none."""
        with self._lock:
            self._storing -= units[0].kind is Kind.STORE
            used = [(unit.key, unit.chain, unit.depth) for unit in units if unit.kind is Kind.LOAD]
            self._use(used)
            self._unpin(units)
            keys = [unit.key for unit in units]
            self._appeared.difference_update(keys)
            self._free(keys)

    def put_later(self, unit: Unit, due: float) -> bool:
        """Queue a unit for *due*. False, and it is not queued, when the instance is retired."""
        with self._lock:
            if self._retired:
                return False
            self._contents.pin(unit.key)
            self._queue.put_later(unit, due)
            self._work_ready.notify()  # one thread, to wait until then
            return True

    def drop_jobs(self, job_ids: Iterable[int]) -> list[Unit]:
        """Remove and return what has not been started of these jobs."""
        wanted = frozenset(job_ids)
        with self._lock:
            return self._unpin(self._queue.drop(lambda unit: unit.job_id in wanted))

    def tick(self) -> list[Unit]:
        """Let time pass: blocks too old are condemned; units past their deadline are removed and returned."""
        with self._lock:
            self._condemn(self._contents.expire(self._home.wall()))
            return self._unpin(self._queue.expire(self._home.clock()))

    def next_due(self) -> float:
        """When ``tick`` has something to do, at the latest."""
        with self._lock:
            oldest = self._contents.next_expiry
            aging = max(_LEAST_PAUSE_S, oldest - self._home.wall()) + self._home.clock()
            return min(self._queue.next_deadline, aging)

    def retire(self) -> list[Unit]:
        """End: no more work. Removes and returns what has not been started."""
        with self._lock:
            self._retired = True
            self._work_ready.notify_all()
            return self._unpin(self._queue.drop(lambda _unit: True))

    # Contents.

    def adopt(self, found: Iterable[BlockInfo]) -> list[OffloadKey]:
        """Take over what an earlier process left; returns the blocks to delete before anything else happens."""
        with self._lock:
            return self._contents.adopt(found, self._home.wall())

    def lacking(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """For each key, whether its block is known not to be there."""
        with self._lock:
            return self._contents.lacking(keys, self._home.wall())

    def gone(self, keys: Sequence[OffloadKey]) -> None:
        """The tier says that these blocks are not in it any more."""
        with self._lock:
            self._appeared.difference_update(keys)
            self._contents.gone(keys)

    def appeared(self, keys: Sequence[OffloadKey]) -> None:
        """The tier says that others stored these blocks."""
        with self._lock:
            self._appeared.update(self._queue.busy(keys))
            self._contents.appeared(keys)

    def absent(self, keys: Sequence[OffloadKey]) -> None:
        """A call was answered that these blocks are not there. What the tier has reported since then counts more."""
        with self._lock:
            self._contents.gone(self._unreported(keys))

    def distrust(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks could not be loaded: serve them no more, unless the tier has reported them since then."""
        with self._lock:
            keys = self._unreported(keys)
            self._contents.distrust(keys)
            if self._contents.shared:
                self._contents.doubts.add(keys, are_wrong=False)

    def condemn(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks gave wrong bytes: have them deleted, those of a shared tier once they were read again (C37)."""
        with self._lock:
            self._contents.distrust(keys)
            if self._contents.shared:
                self._contents.doubts.add(keys, are_wrong=True)
            if not self._retired:
                self._condemn(keys)

    def condemned(self, units: Sequence[Unit]) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Which keys of these delete units are still to be deleted, and which of them are to be read again before."""
        with self._lock:
            keys = [unit.key for unit in units if unit.key in self._condemned]
            return keys, [key for key in keys if key in self._contents.doubts]

    def read_again(self, told: Mapping[OffloadKey, bool | None]) -> list[OffloadKey]:
        """Whether doubted blocks are right now; ``None`` where that can't be told. Returns which not to delete."""
        kept: list[OffloadKey] = []
        with self._lock:
            for key, is_right in told.items():
                if is_right:
                    self._contents.trust([key])
                elif is_right is False and self._contents.doubts.was_wrong():
                    continue
                kept.append(key)
            self._condemned.difference_update(kept)
        return kept

    def deleted(self, keys: Sequence[OffloadKey], fault: Fault | None) -> None:
        """How the delete of condemned blocks ended; after a fault they stay, unserved."""
        with self._lock:
            self._condemned.difference_update(keys)
            if fault is None:
                self._contents.gone(self._unreported(keys))

    def plan_stores(self, units: Sequence[Unit]) -> StorePlan:
        """Decide what each store needs. A block that is there already is stored; one without room is not."""
        outcomes: list[CallOutcome | None] = []
        victims: list[OffloadKey] = []
        to_ask: list[Unit] = []
        with self._lock:
            # Of all at once: none of them can be evicted for another, because queued units pin their keys.
            held = self._contents.holding([unit.key for unit in units], self._home.wall())
            for unit, is_there in zip(units, held, strict=True):
                if is_there:
                    self._use([(unit.key, unit.chain, unit.depth)])
                    outcomes.append(Held.HELD)
                    continue
                try:
                    evict = self._contents.reserve(unit.key, unit.chain, unit.depth)
                except PluginError as error:  # an eviction policy that broke its word, for this block alone
                    outcomes.append(Fault(f"tier {self._name!r}: {error}"))
                    continue
                if evict is None:
                    outcomes.append(Fault(f"tier {self._name!r}: full, and every block in it is in use"))
                    continue
                self._condemned.discard(unit.key)
                victims += evict
                if self._is_to_ask(unit):
                    to_ask.append(unit)
                outcomes.append(None)
            working = {unit.key for unit in units}
            claimed = [victim for victim in victims if victim not in working]
            self._queue.claim(claimed)
        return StorePlan(outcomes=outcomes, victims=victims, claimed=claimed, to_ask=to_ask)

    def asked(self, units: Sequence[Unit], answers: Sequence[CallOutcome]) -> dict[OffloadKey, CallOutcome]:
        """What the tier said of these units. Returns the outcomes of those that need no store.

        Behind a block that is not there the rest of its prompt is not either: the tail is stored last, and leaves
        first.
        """
        with self._lock:
            for unit, answer in zip(units, answers, strict=True):
                if answer is False:
                    self._new_chains[unit.chain] = None
                    self._new_chains.move_to_end(unit.chain)
            while len(self._new_chains) > _MAX_NEW_CHAINS:
                self._new_chains.popitem(last=False)
        return {unit.key: Held.HELD for unit, answer in zip(units, answers, strict=True) if answer is True}

    def room_made(self, plan: StorePlan, fault: Fault | None) -> None:
        """How the delete of the plan's victims ended."""
        with self._lock:
            self._contents.room_made(plan.victims, self._home.wall(), deleted=fault is None)
            self._free(plan.claimed)

    def stored(self, keys: Sequence[OffloadKey], outcomes: Sequence[CallOutcome]) -> dict[OffloadKey, float]:
        """How stores that had room ended. Returns the times of use to note, where a request began in another minute."""
        with self._lock:
            succeeded = {
                key: outcome in (True, Held.HELD) for key, outcome in zip(keys, outcomes, strict=True)
            }
            begun = self._contents.stored(succeeded, self._home.wall())
            return begun if self._marks else {}

    def touch(self, keys: Sequence[OffloadKey], chain: int) -> None:
        """Count a use of each block by the request with the number *chain*, its beginning first."""
        with self._lock:
            self._use([(key, chain, depth) for depth, key in enumerate(keys)])

    def take_events(self) -> list[TierEvent]:
        """Changes of the contents since the last call."""
        return self._contents.presence.take_events()

    # Under the lock.

    def _unreported(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those that the tier has not said to hold since the call on them began."""
        return [key for key in keys if key not in self._appeared]

    def _is_to_ask(self, unit: Unit) -> bool:
        is_new = unit.chain in self._new_chains
        return self._asks and not is_new and self._contents.doubts.is_sound(unit.key)

    def _put(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._contents.pin(unit.key)
        self._queue.put(units)
        if units:  # a thread for each call that they make: a woken thread without work keeps others waiting
            a_call = self._batch[units[0].kind].at(len(units))
            self._work_ready.notify(-(-len(units) // a_call))

    def _use(self, used: Sequence[tuple[OffloadKey, int, int]]) -> None:
        """Count a use of each (key, chain, depth); have those noted of which the storage knows an old use alone."""
        now = self._home.wall()
        marks = [(key, self._contents.touch(key, chain, depth, now)) for key, chain, depth in used]
        if self._marks and not self._retired:
            self._put([Unit(kind=Kind.MARK, key=key, mark=mark) for key, mark in marks if mark is not None])

    def _unpin(self, units: Sequence[Unit]) -> list[Unit]:
        for unit in units:
            self._contents.unpin(unit.key)
        return list(units)

    def _free(self, keys: Sequence[OffloadKey]) -> None:
        self._work_ready.notify(self._queue.done(keys))

    def _condemn(self, keys: Sequence[OffloadKey]) -> None:
        fresh = [key for key in dict.fromkeys(keys) if key not in self._condemned]
        self._condemned.update(fresh)
        self._put([Unit(kind=Kind.DELETE, key=key) for key in fresh])
