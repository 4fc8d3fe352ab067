"""Which jobs are due, and how they ended: exactly one result a job (contract C30), handed out once.

Thread-safe: one lock guards the state; the wake-up of the core is called outside it.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier_core.manager.blocking.calls import Fault, Held, Outcome
from kvtier_core.manager.blocking.work import Kind
from kvtier_core.values import JobResult, TierJob

_FIRST_AHEAD = 16
"""Keys of a prefix that are asked about before any is known to be there."""


@dataclass(slots=True)
class _Pending:
    """A job that is due. Only the first *asked* of its keys have been given out to be worked on."""

    job: TierJob
    kind: Kind
    asked: int = 0
    outcomes: dict[int, Outcome | None] = field(default_factory=dict)
    """By position; ``None`` is a key that nobody could ask about in time."""
    has_ended: bool = False
    """It is a prefix, and one of its keys is not there, or could not be asked about."""

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

    def result(self) -> JobResult:
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


class JobBoard:
    """Jobs from their submission to the collection of their results."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._pending: dict[int, _Pending] = {}
        self._results: list[JobResult] = []

    def begin(self, job: TierJob, kind: Kind, ahead: int = 1) -> range:
        """A job is due. Returns the positions of its keys to work on; one without keys has its result at once.

        Of a prefix these are *ahead* at most: ``settle`` returns what is to be asked about next.
        """
        with self._changed:
            assert job.id not in self._pending, f"job id {job.id} submitted twice"
            pending = _Pending(job=job, kind=kind)
            if job.keys:
                self._pending[job.id] = pending
                return pending.ask(ahead)
            self._results.append(pending.result())
        self._wake()
        return range(0)

    def settle(
        self, ended: Iterable[tuple[int, int, Outcome | None]], ahead: int = 1
    ) -> list[tuple[TierJob, range]]:
        """Keys of jobs (job, index of the key) ended as these outcomes; a job's last one makes its result ready.

        Of what is loaded of the jobs that go on, the core hears at once. Returns of which prefixes more is to be asked
        about, at most *ahead* keys each, and which.
        """
        arrived: dict[int, tuple[Callable[[Sequence[int]], None], list[int]]] = {}
        touched: dict[int, _Pending] = {}
        further: list[tuple[TierJob, range]] = []
        with self._changed:
            before = len(self._results)
            for job_id, index, outcome in ended:
                pending = self._pending.get(job_id)
                if pending is None:
                    continue  # a lookup that had to be answered without it
                assert index not in pending.outcomes, f"key {index} of job {job_id} settled twice"
                if outcome is True and pending.job.arrived is not None:
                    arrived.setdefault(job_id, (pending.job.arrived, []))[1].append(index)
                pending.outcomes[index] = outcome
                pending.has_ended = pending.has_ended or (pending.is_prefix and outcome is not True)
                touched[job_id] = pending
            for job_id, pending in touched.items():
                if more := pending.ask(ahead):
                    further.append((pending.job, more))
                elif len(pending.outcomes) == pending.asked:
                    self._end(job_id)
            going_on = [early for job_id, early in arrived.items() if job_id in self._pending]
            has_results = len(self._results) > before
        for tell, positions in going_on:
            tell(positions)
        if has_results:
            self._wake()
        return further

    def answer_due(self, now: float) -> None:
        """Lookups whose deadline has passed are answered with what is known, if anything is."""
        with self._changed:
            due = [
                job_id
                for job_id, pending in self._pending.items()
                if pending.kind is Kind.LOOKUP
                and pending.job.deadline <= now
                and any(outcome is not None for outcome in pending.outcomes.values())
            ]
            for job_id in due:
                self._end(job_id)

    def _end(self, job_id: int) -> None:
        self._results.append(self._pending.pop(job_id).result())
        self._changed.notify_all()

    def take(self) -> Sequence[JobResult]:
        """The results that are ready, each handed out once."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def wait_settled(self, timeout_s: float) -> list[int]:
        """Wait until no job has a buffer in use; returns the ids of those that still do after *timeout_s*."""
        with self._changed:
            self._changed.wait_for(lambda: not self._with_buffers(), timeout_s)
            return self._with_buffers()

    def _with_buffers(self) -> list[int]:
        return [job_id for job_id, pending in self._pending.items() if pending.kind is not Kind.LOOKUP]
