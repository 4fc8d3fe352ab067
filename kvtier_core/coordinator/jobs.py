"""Jobs from their submission to their one result, and which of them somebody still waits for. Pure; time comes in."""

import enum
import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_core.coordinator.request_state import RequestState
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import Block


class JobKind(enum.Enum):
    """One of a tier, of the device, or of the sealing thread."""

    LOOKUP = "lookup"
    SEAL = "seal"
    TIER_STORE = "tier_store"
    TIER_LOAD = "tier_load"
    DEVICE_STORE = "device_store"
    DEVICE_LOAD = "device_load"


_DEVICE_STORE = JobKind.DEVICE_STORE


@dataclass(eq=False, slots=True)
class Job:
    """A job from its submission to its one result."""

    id: int
    kind: JobKind
    tier: str
    """Empty for device transfers and sealing."""
    request: RequestState
    keys: Sequence[OffloadKey]
    blocks: Sequence[Block]
    deadline: float
    overdue: bool = False
    """Nobody waits for it any more. It only holds its rows' pins."""
    is_prefix: bool = False
    """Of a lookup: behind the first key that the tier lacks no answer is needed."""
    rows: Sequence[int] = ()
    """The rows of its blocks, where they have been listed."""
    begun: float = 0.0
    """Of a tier's: when it was handed over."""
    stale: bool = False
    """A reset came after it: its result says nothing about the tier's present contents."""


class JobTable(OrderedDict[int, Job]):
    """The jobs without a result, oldest first, overdue ones included.

    It keeps counts, so that nobody has to walk it: a tier may leave very many jobs unanswered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_awaited = 0
        """Jobs that somebody waits for."""
        self.storing_rows = 0
        """Rows of device stores that are waited for."""
        self._deadlines: list[tuple[float, int]] = []

    def add(self, job: Job) -> None:
        """A job begins."""
        self[job.id] = job
        self._count(job, 1)
        if job.deadline < math.inf:
            heapq.heappush(self._deadlines, (job.deadline, job.id))

    def end(self, job_id: int) -> Job:
        """A job is over. Raises ``KeyError`` when there is none of this number."""
        job = self.pop(job_id)
        if not job.overdue:
            self._count(job, -1)
        return job

    def give_up(self, job: Job) -> None:
        """Nobody waits for *job* any more."""
        job.overdue = True
        self._count(job, -1)

    def _count(self, job: Job, change: int) -> None:
        self.num_awaited += change
        if job.kind is _DEVICE_STORE:
            self.storing_rows += change * len(job.blocks)

    def next_deadline(self) -> float | None:
        """When the first job that somebody still waits for, and that has a deadline, is due."""
        while self._deadlines:
            deadline, job_id = self._deadlines[0]
            job = self.get(job_id)
            if job is not None and not job.overdue:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def next_due(self, now: float) -> Job | None:
        """The first job whose deadline has passed and that somebody waits for; ``None`` when there is none."""
        deadline = self.next_deadline()
        return None if deadline is None or deadline > now else self[self._deadlines[0][1]]
