"""Jobs on their way, and which part of which is next: lookups, then loads, then stores, each in order of arrival.

Pure bookkeeping: no threads, no clock, no client. A job is done in parts, so that one which is more urgent waits for a
part alone. Several threads may have parts of one job.
"""

import enum
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvtier_core.tier import JobResult, OffloadKey, TierJob

Outcome = bool | str | None
"""How a key ended: moved or there, or not (absent, declined), or why it failed; ``None`` for what is not known."""


def name_of(namespace: str, key: OffloadKey) -> str:
    """What the store calls a block."""
    return f"kvtier/{namespace}/{key.hex()}"


class Kind(enum.IntEnum):
    """What a job asks for. The smaller one goes first: a request waits for lookups and loads, nobody for a store."""

    LOOKUP = 0
    LOAD = 1
    STORE = 2


@dataclass(eq=False)
class Work:
    """A job. It keeps the namespace that it was submitted under, so that a reset does not redirect it."""

    kind: Kind
    job: TierJob
    namespace: str
    begun: int = 0
    """How many keys have been given to a thread, or need no thread any more."""
    running: int = 0
    """How many of them a thread has."""
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nothing is known of any key."""
        self.outcomes = [None] * len(self.job.keys)

    def names(self, part: range) -> list[str]:
        """What the store calls these blocks."""
        return [name_of(self.namespace, key) for key in self.job.keys[part.start : part.stop]]

    @property
    def is_over(self) -> bool:
        """Whether no thread has, or will have, a part of it."""
        return self.begun == len(self.outcomes) and not self.running

    def take(self, most: int) -> range:
        """The positions of the next keys, at most *most*."""
        part = range(self.begun, min(self.begun + most, len(self.outcomes)))
        self.begun = part.stop
        self.running += len(part)
        return part

    def end(self, part: range, outcomes: Sequence[Outcome]) -> None:
        """A thread has done *part*. A lookup of a prefix ends at the first key that is not there."""
        self.running -= len(part)
        self.outcomes[part.start : part.stop] = outcomes
        if self.job.is_prefix and False in outcomes:
            self.begun = len(self.outcomes)

    def give_up(self, reason: str) -> None:
        """Nothing more of it is begun. What that leaves of a lookup is not known, which is no fault."""
        if self.kind is not Kind.LOOKUP:
            self.outcomes[self.begun :] = [reason] * (len(self.outcomes) - self.begun)
        self.begun = len(self.outcomes)

    def result(self) -> JobResult:
        """The result, once it is over."""
        ended = list(zip(self.job.keys, self.outcomes, strict=True))
        faults = [(key, outcome) for key, outcome in ended if isinstance(outcome, str)]
        error = f"{len(faults)} of {len(ended)} blocks failed: {faults[0][1]}" if faults else None
        failed = tuple(key for key, _ in faults)
        if self.kind is Kind.LOOKUP:
            present = tuple(None if isinstance(outcome, str) else outcome for outcome in self.outcomes)
            return JobResult(job_id=self.job.id, present=present, failed=failed, error=error)
        missing = tuple(key for key, outcome in ended if outcome is False)
        return JobResult(job_id=self.job.id, missing=missing, failed=failed, error=error)


class WorkQueue:
    """The works of which something is still to begin."""

    def __init__(self) -> None:
        self._order = count()
        self._waiting: list[tuple[Kind, int, Work]] = []  # a heap

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, work: Work) -> None:
        """Behind all others of its kind."""
        heapq.heappush(self._waiting, (work.kind, next(self._order), work))

    def first(self) -> Work | None:
        """The work whose turn it is; those that have no turn any more are left out."""
        while self._waiting and self._waiting[0][2].begun == len(self._waiting[0][2].outcomes):
            heapq.heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None


class Doubts:
    """Names of blocks that gave wrong bytes: they are not there until others have replaced them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, names: Iterable[str]) -> None:
        """These gave wrong bytes. Beyond the limit the oldest are forgotten, which costs another wrong load of each."""
        self._names.update(dict.fromkeys(names))
        while len(self._names) > self._limit:
            del self._names[next(iter(self._names))]

    def replaced(self, names: Iterable[str]) -> None:
        """Right blocks stand in their places."""
        for name in names:
            self._names.pop(name, None)
