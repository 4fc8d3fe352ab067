"""One job on its way: what it asks for, on which bucket, how far it has come. Order and threads are not its."""

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier_core.tier import JobResult, OffloadKey, TierJob
from kvtier_example_async.bucket import Bucket


class Kind(enum.IntEnum):
    """What a job asks for. The smaller one goes first: a request waits for lookups and loads, nobody for a store."""

    LOOKUP = 0
    LOAD = 1
    STORE = 2


@dataclass(eq=False)
class Work:
    """A job. It keeps the bucket of the namespace it was submitted under, so that a reset does not redirect it."""

    kind: Kind
    job: TierJob
    bucket: Bucket
    report_left: Callable[[Sequence[OffloadKey]], None]
    is_cancelled: bool = False
    """Set by another thread; looked at before every block."""
    _present: list[bool] = field(default_factory=list)
    _missing: list[OffloadKey] = field(default_factory=list)
    _failed: list[OffloadKey] = field(default_factory=list)
    _error: str | None = None

    def run(self) -> JobResult:
        """Do the job block by block. Whatever a block raises fails that block, and never the thread.

        The result says it all: a key in neither list was moved whole. After this returns, no buffer is touched.
        """
        for index, key in enumerate(self.job.keys):
            try:
                self._move(index, key)
            except Exception as error:  # noqa: BLE001 - a client may raise anything, and the job's result is due
                self._failed.append(key)
                self._error = self._error or f"{type(error).__name__}: {error}"
        return self._result()

    def fail(self, reason: str) -> JobResult:
        """The result of a job that is not going to run."""
        return JobResult(job_id=self.job.id, failed=self.job.keys, error=reason)

    def _move(self, index: int, key: OffloadKey) -> None:
        if self.is_cancelled:
            raise TimeoutError("cancelled")
        if self.job.deadline <= time.monotonic():
            raise TimeoutError("the deadline passed")
        if self.kind is Kind.LOOKUP:
            self._present.append(self.bucket.has(key))
        elif self.kind is Kind.STORE:
            if left := self.bucket.put(key, self.job.buffers[index]):
                self.report_left(left)
        elif not self.bucket.get(key, self.job.buffers[index]):
            self._missing.append(key)

    def _result(self) -> JobResult:
        # A lookup answers for every key or for none.
        answered = self.kind is Kind.LOOKUP and not self._failed
        return JobResult(
            job_id=self.job.id,
            present=self._present if answered else None,
            missing=self._missing,
            failed=self._failed,
            error=self._error,
        )
