"""Decides which call on a tier is made next: loads and lookups, deletes, stores; never two at a time on one key.

Loads and lookups take turns: every job that waits has a part of the next call of its kind, and where both kinds wait a
call of the one follows a call of the other. So a job of one block waits for a turn of a job of a thousand, not for the
thousand.

Pure bookkeeping: no lock of its own (its owner holds one around every method), no threads, no clock, no I/O.
"""

import enum
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking.pace import Pace


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
_SHORT_TURN = 16
"""Units of one call that are too few to be worth cutting up further."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
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


class _Line:
    """The units of one kind that wait for a call. Those of one turn are in order; the turns go round."""

    def __init__(self) -> None:
        self._turns: OrderedDict[int | None, deque[Unit]] = OrderedDict()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Unit]:
        return chain.from_iterable(self._turns.values())

    def put(self, unit: Unit) -> None:
        """Behind all others of its turn."""
        self._turns.setdefault(unit.turn, deque()).append(unit)
        self._waiting += 1

    def put_first(self, unit: Unit) -> None:
        """Before all others: it has waited for its key."""
        self._turns.setdefault(unit.turn, deque()).appendleft(unit)
        self._turns.move_to_end(unit.turn, last=False)
        self._waiting += 1

    def pop(self) -> Unit:
        """Take the next unit; the turn after its own is next."""
        turn, units = next(iter(self._turns.items()))
        unit = units.popleft()
        if units:
            self._turns.move_to_end(turn)
        else:
            del self._turns[turn]
        self._waiting -= 1
        return unit

    def drop(self, unwanted: Callable[[Unit], bool]) -> None:
        """Leave out the *unwanted*."""
        kept = [unit for unit in self if not unwanted(unit)]
        self._turns.clear()
        self._waiting = 0
        for unit in kept:
            self.put(unit)


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

    def put(self, unit: Unit) -> None:
        """Queue a unit behind all others of its kind."""
        self._next_deadline = min(self._next_deadline, unit.deadline)
        if unit.key in self._busy:
            self._park(unit)
        else:
            self._ready[unit.kind].put(unit)

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
            self.put(heapq.heappop(self._later)[2])
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
            unit = ready.pop()
            if unit.key in self._busy:
                self._park(unit)
            else:
                self._busy.add(unit.key)
                taken.append(unit)
        return taken

    def claim(self, keys: Iterable[OffloadKey]) -> None:
        """Make keys busy that no unit was taken for: blocks about to be evicted."""
        for key in keys:
            assert key not in self._busy, f"claimed while a call on it runs: {key.hex()}"
            self._busy.add(key)

    def done(self, keys: Iterable[OffloadKey]) -> int:
        """The calls on these keys have ended. Returns how many parked units became ready."""
        woken = 0
        for key in keys:
            self._busy.remove(key)
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
