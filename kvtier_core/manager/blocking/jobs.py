"""Which jobs are due, and how they ended: exactly one result a job (contract C30).

Thread-safe: one lock guards the state; results are handed out outside it.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvtier_core.manager.blocking.calls import CallOutcome, Fault, Held
from kvtier_core.manager.blocking.work import Kind
from kvtier_core.values import JobResult, TierJob

_FIRST_AHEAD = 64
"""Keys of a prefix that are asked about before any is known to be there."""

Outcomes = Mapping[int, CallOutcome | None]
"""How keys of one job ended, by position; ``None`` is a key that nobody could ask about in time."""


@dataclass(slots=True)
class _Pending:
    """A job that is due. Only the first *asked* of its keys have been given out to be worked on."""

    job: TierJob
    kind: Kind
    asked: int = 0
    outcomes: dict[int, CallOutcome | None] = field(default_factory=dict)
    has_ended: bool = False
    """It is a prefix, and one of its keys is not there, or could not be asked about."""
    is_plain: bool = True
    """All outcomes so far are True."""

    @property
    def is_prefix(self) -> bool:
        return self.kind is Kind.LOOKUP and self.job.is_prefix

    def ask(self, ahead: int) -> range:
        """The positions to work on next. Of a prefix *ahead* wait at most, and no more than are known to be there."""
        end = len(self.job.keys)
        if self.is_prefix:
            known = len(self.outcomes)
            end = self.asked if self.has_ended else min(end, known + min(ahead, max(_FIRST_AHEAD, known)))
        begin, self.asked = self.asked, max(self.asked, end)
        return range(begin, self.asked)

    def settle(self, ended: Outcomes) -> None:
        """These keys ended so."""
        assert self.outcomes.keys().isdisjoint(ended), f"a key of job {self.job.id} settled twice"
        self.outcomes.update(ended)
        if not all(outcome is True for outcome in ended.values()):
            self.is_plain = False
            self.has_ended = self.has_ended or self.is_prefix

    @property
    def is_fault(self) -> bool:
        """Whether something went wrong, other than that the tier was reset or shut down meanwhile."""
        return not self.is_plain and any(
            isinstance(outcome, Fault) and not outcome.is_end for outcome in self.outcomes.values()
        )

    def result(self) -> JobResult:
        if self.is_plain and self.kind is not Kind.LOOKUP:
            return JobResult(job_id=self.job.id)
        ended = [(key, self.outcomes.get(index)) for index, key in enumerate(self.job.keys)]
        faults = [(key, outcome.text) for key, outcome in ended if isinstance(outcome, Fault)]
        error = None
        if faults:
            texts = list(dict.fromkeys(text for _, text in faults))
            more = f" (and {len(texts) - 1} other errors)" if len(texts) > 1 else ""
            error = f"{len(faults)} of {len(ended)} blocks failed: {texts[0]}{more}"
        failed = tuple(key for key, _ in faults)
        if self.kind is Kind.LOOKUP:
            present = tuple(outcome if isinstance(outcome, bool) else None for _, outcome in ended)
            return JobResult(job_id=self.job.id, present=present, failed=failed, error=error)
        missing = tuple(key for key, outcome in ended if outcome is False)
        held = tuple(key for key, outcome in ended if outcome is Held.HELD)
        return JobResult(job_id=self.job.id, missing=missing, held=held, failed=failed, error=error)


Finish = Callable[[Kind, JobResult, bool], None]
"""Takes a job's result, and whether something went wrong."""


class JobBoard:
    """Jobs from their submission to their results."""

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}

    def begin(self, job: TierJob, kind: Kind, ahead: int = 1) -> range:
        """A job is due; without keys it ends at once. Returns the positions to work on, of a prefix *ahead* at most."""
        pending = _Pending(job=job, kind=kind)
        with self._lock:
            assert job.id not in self._pending, f"job id {job.id} submitted twice"
            if job.keys:
                self._pending[job.id] = pending
                return pending.ask(ahead)
        self._hand_out([pending])
        return range(0)

    def settle(self, ended: Mapping[int, Outcomes], ahead: int = 1) -> list[tuple[TierJob, range]]:
        """Keys of these jobs ended so; a job's last one makes its result ready.

        Blocks that were loaded are told of before they count: when a job has its result, all of them have been checked.
        Returns the prefixes to ask on about, with the positions, at most *ahead* each.
        """
        with self._lock:
            loads = [
                (arrived, outcomes)
                for job_id, outcomes in ended.items()
                if (pending := self._pending.get(job_id)) and (arrived := pending.job.arrived)
            ]
        for tell, outcomes in loads:
            if came := [position for position, outcome in outcomes.items() if outcome is True]:
                tell(came)
        further: list[tuple[TierJob, range]] = []
        over: list[_Pending] = []
        with self._lock:
            for job_id, outcomes in ended.items():
                pending = self._pending.get(job_id)
                if pending is None:
                    continue  # a lookup that had to be answered without it
                pending.settle(outcomes)
                if more := pending.ask(ahead):
                    further.append((pending.job, more))
                elif len(pending.outcomes) == pending.asked:
                    over.append(self._pending.pop(job_id))
        self._hand_out(over)
        return further

    def next_due(self, now: float) -> float:
        """When ``answer_due`` has something to do for a lookup that is not late yet."""
        with self._lock:
            waiting = [p.job.deadline for p in self._pending.values() if p.kind is Kind.LOOKUP]
        return min((deadline for deadline in waiting if deadline > now), default=float("inf"))

    def answer_due(self, now: float) -> None:
        """Lookups whose deadline has passed are answered with what is known, if anything is."""
        with self._lock:
            due = [
                job_id
                for job_id, pending in self._pending.items()
                if pending.kind is Kind.LOOKUP
                and pending.job.deadline <= now
                and any(outcome is not None for outcome in pending.outcomes.values())
            ]
            over = [self._pending.pop(job_id) for job_id in due]
        self._hand_out(over)

    def _hand_out(self, over: Iterable[_Pending]) -> None:
        for pending in over:
            self._finish(pending.kind, pending.result(), pending.is_fault)
