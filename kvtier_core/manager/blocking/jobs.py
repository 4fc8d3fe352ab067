"""Which jobs are due, and how they ended: exactly one result a job (contract C30), handed out once.

Thread-safe: one lock guards the state; the wake-up of the core is called outside it.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier_core.manager.blocking.calls import Fault, Outcome
from kvtier_core.manager.blocking.work import Kind
from kvtier_core.values import JobResult, TierJob


@dataclass(slots=True)
class _Pending:
    job: TierJob
    kind: Kind
    remaining: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def result(self) -> JobResult:
        ended = [(key, self.outcomes[index]) for index, key in enumerate(self.job.keys)]
        faults = [(key, outcome.text) for key, outcome in ended if isinstance(outcome, Fault)]
        error = None
        if faults:
            texts = list(dict.fromkeys(text for _, text in faults))
            more = f" (and {len(texts) - 1} other errors)" if len(texts) > 1 else ""
            error = f"{len(faults)} of {len(ended)} blocks failed: {texts[0]}{more}"
        failed = tuple(key for key, _ in faults)
        if self.kind is Kind.LOOKUP:
            present = tuple(outcome is True for _, outcome in ended)
            return JobResult(job_id=self.job.id, present=present, failed=failed, error=error)
        missing = tuple(key for key, outcome in ended if outcome is False)
        return JobResult(job_id=self.job.id, missing=missing, failed=failed, error=error)


class JobBoard:
    """Jobs from their submission to the collection of their results."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._pending: dict[int, _Pending] = {}
        self._results: list[JobResult] = []

    def begin(self, job: TierJob, kind: Kind) -> None:
        """A job is due. One without keys has its result at once."""
        with self._changed:
            assert job.id not in self._pending, f"job id {job.id} submitted twice"
            pending = _Pending(job=job, kind=kind, remaining=len(job.keys))
            if job.keys:
                self._pending[job.id] = pending
                return
            self._results.append(pending.result())
        self._wake()

    def settle(self, ended: Iterable[tuple[int, int, Outcome]]) -> None:
        """Keys of jobs (job, index of the key) ended as these outcomes; a job's last one makes its result ready.

        Of what is loaded of the jobs that go on, the core hears at once.
        """
        arrived: dict[int, tuple[Callable[[Sequence[int]], None], list[int]]] = {}
        with self._changed:
            before = len(self._results)
            for job_id, index, outcome in ended:
                pending = self._pending[job_id]
                assert index not in pending.outcomes, f"key {index} of job {job_id} settled twice"
                if outcome is True and pending.job.arrived is not None:
                    arrived.setdefault(job_id, (pending.job.arrived, []))[1].append(index)
                pending.outcomes[index] = outcome
                pending.remaining -= 1
                if not pending.remaining:
                    del self._pending[job_id]
                    self._results.append(pending.result())
            going_on = [early for job_id, early in arrived.items() if job_id in self._pending]
            has_results = len(self._results) > before
            if has_results:
                self._changed.notify_all()
        for tell, positions in going_on:
            tell(positions)
        if has_results:
            self._wake()

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
