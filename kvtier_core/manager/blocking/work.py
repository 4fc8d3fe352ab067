"""Decides which call on a tier is made next, how much it takes, and which failed calls are made again.

Loads and lookups come first, then deletes, then stores; never two at a time on one key. Loads and lookups take turns:
a call takes some neighbours of one job, then of the next, and where both kinds wait, they alternate. So a job of one
block waits for one turn of a job of a thousand blocks, not for all of it.

Pure bookkeeping: its owner holds a lock around every method. No threads, no clock, no I/O.
"""

import enum
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking.calls import CallOutcome, Fault
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import TierContext, TierInfo


class Kind(enum.IntEnum):
    """What a unit asks of the tier, in order of urgency; loads and lookups are equally urgent."""

    LOAD = 0
    LOOKUP = 1
    DELETE = 2
    """Before stores, so that a block stored anew is never removed by the delete of its predecessor."""
    MARK = 3
    """Note that a block was used. Before stores, which may be held up: it takes little."""
    STORE = 4


_TAKE_TURNS = (Kind.LOAD, Kind.LOOKUP)
MAX_BATCH_BYTES = 4 << 20
"""Moved by one call, one block at least: more gains a disk nothing, and others wait for the call's end."""
KEYS_A_CALL = 256
"""Keys deleted in one call: enough to share its cost, few enough to stay quick."""
_TURNS = 10
"""Calls that each thread makes of a long queue at least: a newcomer waits for one, and for the one that it is in."""
_BLOCKS_A_STORE = 1024
"""Blocks stored in one call: what a tier writes down of them is one transaction, and others wait for its end."""
_STORED_AT_ONCE = 4
"""All threads together store at most one of so many parts of the tier at a time, where their calls are large."""
_FIRST_ASKED = 4
_MOST_ASKED = 256
_QUICK_S = 0.05
"""Calls this quick are never made smaller."""
_HARDLY = 1.5
"""How much longer than the quickest call is hardly longer, as a factor."""
_RETRIES = 2
"""Calls after the first: they outlast a connection that was closed while idle. A server that restarts is the breaker's
affair."""
_FIRST_RETRY_S = 0.1
"""Pause before the first of them; each later pause is twice as long."""
_SHORT_TURN = 24
"""Units of one call that are too few to be worth cutting up further."""
_KIND_AND_JOB = attrgetter("kind", "job_id")
_KEY = attrgetter("key")
_DEADLINE = attrgetter("deadline")
_RUN = 8
"""Units of one job that a call takes before it looks at the next job: neighbours, which tiers move together."""


class Unit(NamedTuple):
    """One key's part of a job, but for deletes and marks.

    A tuple, because one is made for every block that moves: it costs a fifth of a frozen dataclass.
    """

    kind: Kind
    key: OffloadKey
    job_id: int | None = None
    position: int = 0
    row: int = -1
    """Of loads and stores: the row that is filled or read."""
    deadline: float = float("inf")
    tries: int = 0
    """Calls made for it so far."""
    chain: int = 0
    """Of loads and stores: the number of their request (``Entry.chain``)."""
    mark: float = 0.0
    """Of marks: the time of use to be noted."""

    @property
    def depth(self) -> int:
        """Where the block stands among those of its request: jobs come in the order of the prompt."""
        return (self.job_id or 0) << 32 | self.position

    @property
    def turn(self) -> int | None:
        """The job whose turn it is part of; stores and deletes, for which nobody waits, keep the order of arrival."""
        return self.job_id if self.kind in _TAKE_TURNS else None


@dataclass(frozen=True, slots=True)
class Limit:
    """How many units of one kind one call may take: ``at_least`` so many, and more, up to ``most``, of a long queue."""

    at_least: int
    most: int
    shares: int
    """Beyond ``at_least`` no call takes more than one of so many equal parts of the queue."""
    turns: int | None = None
    """Beyond a few units no call takes more than one of so many equal parts: whoever comes next waits that long."""

    def at(self, waiting: int) -> int:
        """The limit while so many wait."""
        limit = max(self.at_least, min(self.most, waiting // self.shares))
        return limit if self.turns is None else min(limit, max(_SHORT_TURN, waiting // self.turns))


def batch_limits(
    info: TierInfo, settings: TierSettings, context: TierContext, *, batches: bool
) -> dict[Kind, Limit]:
    """How much goes into a call of a tier, which takes *batches* or block after block."""
    threads = settings.threads
    blocks = max(1, MAX_BATCH_BYTES // context.row_bytes) if batches else 1
    loads, stores = (info.load_batch, info.store_batch) if batches else (1, 1)
    most = min(blocks * stores, _BLOCKS_A_STORE)
    if context.capacity_bytes is not None:
        # What is being stored takes room and can't be evicted: all calls together leave most of the tier alone.
        share = context.capacity_bytes // context.row_bytes // (_STORED_AT_ONCE * threads)
        most = max(blocks, min(most, share))
    turns = _TURNS * threads
    return {
        Kind.LOAD: Limit(blocks, blocks * loads, threads, turns),
        Kind.DELETE: Limit(KEYS_A_CALL, KEYS_A_CALL, 1),
        Kind.MARK: Limit(KEYS_A_CALL, KEYS_A_CALL, 1),
        Kind.STORE: Limit(min(most, blocks * -(-stores // 4)), most, 2),
    }


class Pace:
    """How many keys one call of ``contains`` asks about: as many as take hardly longer than a few.

    A storage that asks key by key gets few, so that answers come early and little is asked in vain. A storage that
    asks for many together, or answers from memory, gets many.
    """

    def __init__(self) -> None:
        self.keys = _FIRST_ASKED
        """How many keys the next call is to ask about."""
        self._quickest_s = float("inf")

    def at(self, waiting: int) -> int:  # noqa: ARG002 - as ``Limit.at``
        """How many keys one call may take, however many wait."""
        return self.keys

    def note(self, keys: int, seconds: float) -> None:
        """A call that asked about *keys* took *seconds*.

        Example: 10 ms a key, one after the other, makes calls of 4 or 8 keys; 200 ms for up to 32 keys together makes
        calls of 32 or 64.
        """
        # A single key takes what the storage takes: from there it can only get slower by asking for more.
        self._quickest_s = seconds if keys == 1 else min(self._quickest_s, seconds)
        if seconds > max(_QUICK_S, _HARDLY * self._quickest_s):
            self.keys = max(1, min(self.keys, keys) // 2)
        elif keys >= self.keys:
            self.keys = min(_MOST_ASKED, 2 * self.keys)


def retry_at(unit: Unit, outcome: CallOutcome, now: float) -> float | None:
    """When to call the tier again for *unit*, whose call has just ended so; ``None`` when that was the last."""
    if not isinstance(outcome, Fault) or not outcome.is_transient:
        return None
    if unit.kind in (Kind.DELETE, Kind.MARK) or unit.tries >= _RETRIES:
        return None
    due = now + _FIRST_RETRY_S * (1 << unit.tries)
    return due if due < unit.deadline else None


class _Line:
    """The units of one kind that wait for a call. Those of one turn are in order; the turns go round."""

    def __init__(self) -> None:
        self._turns: OrderedDict[int | None, deque[Unit]] = OrderedDict()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Unit]:
        return chain.from_iterable(self._turns.values())

    def put(self, units: Sequence[Unit]) -> None:
        """Units of one turn, behind all others of it."""
        self._turns.setdefault(units[0].turn, deque()).extend(units)
        self._waiting += len(units)

    def put_first(self, unit: Unit) -> None:
        """Before all others: it has waited for its key."""
        self._turns.setdefault(unit.turn, deque()).appendleft(unit)
        self._turns.move_to_end(unit.turn, last=False)
        self._waiting += 1

    def pop(self, most: int) -> list[Unit]:
        """Take the next units of one turn, at most *most* and hardly more than a fifth; the turn after it is next."""
        turn, units = next(iter(self._turns.items()))
        taken = [units.popleft() for _ in range(min(most, len(units), max(_RUN, len(units) // 5)))]
        if units:
            self._turns.move_to_end(turn)
        else:
            del self._turns[turn]
        self._waiting -= len(taken)
        return taken

    def drop(self, unwanted: Callable[[Unit], bool]) -> None:
        """Leave out the *unwanted*."""
        kept = [unit for unit in self if not unwanted(unit)]
        self._turns.clear()
        self._waiting = 0
        for unit in kept:
            self.put([unit])


class WorkQueue:
    """Units in order of kind, then turn. A unit whose key is busy is parked until the key is free.

    Cost: O(1) a unit for ``put``, ``take`` and ``done`` as long as few units wait for one key.
    """

    def __init__(self) -> None:
        self._ready = {kind: _Line() for kind in Kind}  # in the order in which they are looked at
        self._parked: dict[OffloadKey, deque[Unit]] = {}
        self._later: list[tuple[float, int, Unit]] = []
        self._num_later = 0  # ever: keeps units that are due at one time in order of arrival
        self._busy: set[OffloadKey] = set()
        self._last: Kind | None = None
        """Of the last call."""
        self._next_deadline = float("inf")

    def put(self, units: Sequence[Unit]) -> None:
        """Queue units behind all others of their kinds."""
        for (kind, _), group in groupby(units, key=_KIND_AND_JOB):
            of_job = list(group)
            self._next_deadline = min(self._next_deadline, *map(_DEADLINE, of_job))
            if not self._busy.isdisjoint(map(_KEY, of_job)):
                for unit in of_job:
                    if unit.key in self._busy:
                        self._park(unit)
                of_job = [unit for unit in of_job if unit.key not in self._busy]
            if of_job:
                self._ready[kind].put(of_job)

    def put_later(self, unit: Unit, due: float) -> None:
        """Queue a unit that nothing is to be done for before *due*."""
        self._next_deadline = min(self._next_deadline, unit.deadline)
        self._num_later += 1
        heapq.heappush(self._later, (due, self._num_later, unit))

    @property
    def next_deadline(self) -> float:
        """No unit that waits has an earlier deadline."""
        return self._next_deadline

    @property
    def next_due(self) -> float | None:
        """When the first unit that was put for later is due."""
        return self._later[0][0] if self._later else None

    def take(self, limits: Mapping[Kind, Limit | Pace], now: float, *, stores: bool = True) -> list[Unit]:
        """The next units to work on, all of one kind, at most its limit; their keys are busy until ``done``.

        Empty when nothing can be done at *now*, without *stores* also when there are only stores.
        """
        while self._later and self._later[0][0] <= now:
            self.put([heapq.heappop(self._later)[2]])
        for kind in self._in_order():
            if kind is Kind.STORE and not stores:
                break
            if taken := self._take(self._ready[kind], limits[kind]):
                self._last = kind
                return taken
        return []

    def _in_order(self) -> Sequence[Kind]:
        """The kinds as they come next: a call that looks up follows one that loads, where both wait."""
        if self._last is Kind.LOAD:
            return (Kind.LOOKUP, Kind.LOAD, *list(Kind)[2:])
        return tuple(Kind)

    def _take(self, ready: _Line, limit: Limit | Pace) -> list[Unit]:
        taken: list[Unit] = []
        most = limit.at(len(ready))
        while ready and len(taken) < most:
            units = ready.pop(most - len(taken))
            keys = {unit.key for unit in units}
            if len(keys) == len(units) and self._busy.isdisjoint(keys):
                self._busy |= keys
                taken += units
                continue
            for unit in units:
                if unit.key in self._busy:
                    self._park(unit)
                else:
                    self._busy.add(unit.key)
                    taken.append(unit)
        return taken

    def busy(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        """Those of *keys* on which a call runs."""
        return self._busy.intersection(keys)

    def claim(self, keys: Iterable[OffloadKey]) -> None:
        """Make keys busy that no unit was taken for: blocks about to be evicted."""
        for key in keys:
            assert key not in self._busy, f"claimed while a call on it runs: {key.hex()}"
            self._busy.add(key)

    def done(self, keys: Iterable[OffloadKey]) -> int:
        """The calls on these keys have ended. Returns how many parked units became ready."""
        woken = 0
        freed = set(keys)
        assert self._busy >= freed, "done with a key that no call ran on"
        self._busy -= freed
        for key in self._parked.keys() & freed:
            for unit in reversed(self._parked.pop(key, ())):
                self._ready[unit.kind].put_first(unit)
                woken += 1
        return woken

    def expire(self, now: float) -> list[Unit]:
        """Remove and return the units whose deadline has passed. Costs nothing before the first deadline."""
        if now < self._next_deadline:
            return []
        expired = self.drop(lambda unit: unit.deadline <= now)
        self._next_deadline = min((unit.deadline for unit in self._waiting()), default=float("inf"))
        return expired

    def drop(self, unwanted: Callable[[Unit], bool]) -> list[Unit]:
        """Remove and return the units that wait and are *unwanted*. Cost: O(units that wait)."""
        dropped = [unit for unit in self._waiting() if unwanted(unit)]
        if dropped:
            for line in self._ready.values():
                line.drop(unwanted)
            for key, units in list(self._parked.items()):
                self._parked[key] = deque(unit for unit in units if not unwanted(unit))
            self._later = [entry for entry in self._later if not unwanted(entry[2])]
            heapq.heapify(self._later)
        return dropped

    def _park(self, unit: Unit) -> None:
        self._parked.setdefault(unit.key, deque()).append(unit)

    def _waiting(self) -> Iterable[Unit]:
        for queues in (self._ready, self._parked):
            for units in queues.values():
                yield from units
        for _, _, unit in self._later:
            yield unit
