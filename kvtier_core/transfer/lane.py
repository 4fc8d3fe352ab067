"""A lane: one thread that carries out the transfers of one direction, in order, and tells the control page.

It decides what becomes of each job (done, failed, dropped) and guarantees its one result. A lane knows neither torch
nor bytes: a device says how a job is copied.
"""

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvtier_core.transfer.control import ControlPage
from kvtier_core.transfer.device import TransferResult
from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.plan import GroupTransfer
from kvtier_core.transfer.waiting import bounded

_log = logging.getLogger("kvtier.transfer")


class LaneJob(NamedTuple):
    """One transfer to carry out, after *compute_done* has returned."""

    job_id: int
    parts: Sequence[GroupTransfer]
    compute_done: Callable[[], object] | None


Copy = Callable[[Sequence[GroupTransfer]], int]
"""Carries out a transfer and returns the bytes it moved."""


class Lane:
    """Calls *copy* for one job after the other on a daemon thread."""

    def __init__(
        self,
        direction: Direction,
        control: ControlPage,
        worker: int,
        copy: Copy,
        on_finished: Callable[[], None] | None = None,
        enter: Callable[[], object] | None = None,
    ) -> None:
        """*enter*, where given, is what the thread does before its first job."""
        self._direction = direction
        self._control = control
        self._worker = worker
        self._copy = copy
        self._on_finished = on_finished
        self._enter = enter
        self._changed = threading.Condition()  # guards the five below
        self._queue: deque[LaneJob] = deque()
        self._unfinished: set[int] = set()
        self._results: list[TransferResult] = []
        self._last_id = control.get_last_started(worker, direction)
        self._stopping = False
        control.hand(worker, direction, self._last_id)  # what a dead process had in its line never comes
        self._thread = threading.Thread(
            target=self._run, name=f"kvtier-{direction.value}-{worker}", daemon=True
        )
        self._thread.start()

    def submit(self, job: LaneJob) -> None:
        """Queue a job. Raises ``ValueError`` when its id does not grow, ``RuntimeError`` after ``stop``."""
        with self._changed:
            if self._stopping:
                raise RuntimeError(f"{self._direction.value} job {job.job_id} was submitted after shutdown")
            if job.job_id <= self._last_id:
                raise ValueError(
                    f"{self._direction.value} job {job.job_id} must be above the last one, {self._last_id}"
                )
            self._last_id = job.job_id
            with suppress(ValueError):  # the pool is closed already, which fails the job when it begins
                self._control.hand(self._worker, self._direction, job.job_id)
            self._unfinished.add(job.job_id)
            self._queue.append(job)
            self._changed.notify_all()

    def take_finished(self) -> list[TransferResult]:
        """The results since the last call."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def wait(self, job_ids: Iterable[int], timeout_s: float) -> bool:
        """Block until none of these jobs is unfinished; False on time-out."""
        wanted = frozenset(job_ids)
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished.isdisjoint(wanted), bounded(timeout_s))

    def stop(self) -> None:
        """Take no more jobs; drop those not begun."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after ``stop``; False on time-out."""
        self._thread.join(bounded(timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._enter is not None:
            try:
                self._enter()
            except BaseException:  # noqa: BLE001 - the copies then say themselves what they lack
                _log.exception("the %s lane could not set up its thread", self._direction.value)
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Carry out one job; False when none will follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopping)
            if not self._queue:
                return False
            job = self._queue.popleft()
        result = self._carry_out(job)
        with self._changed:
            self._results.append(result)
            self._unfinished.discard(job.job_id)
            self._changed.notify_all()
        self._tell()
        return True

    def _carry_out(self, job: LaneJob) -> TransferResult:
        try:
            self._control.begin(self._worker, self._direction, job.job_id)
            try:
                return self._transfer(job)
            finally:
                self._control.finish(self._worker, self._direction, job.job_id)
        except BaseException as error:  # noqa: BLE001 - the job gets its result, the lane lives on
            text = "".join(traceback.format_exception_only(error)).strip()
            return TransferResult(job_id=job.job_id, direction=self._direction, ok=False, error=text)

    def _transfer(self, job: LaneJob) -> TransferResult:
        if job.compute_done is not None and not self._stopping:
            job.compute_done()
        if self._stopping:
            return TransferResult(job_id=job.job_id, direction=self._direction, ok=False, dropped=True)
        begun = time.perf_counter()
        moved = self._copy(job.parts)
        seconds = time.perf_counter() - begun
        return TransferResult(
            job_id=job.job_id, direction=self._direction, ok=True, bytes=moved, seconds=seconds
        )

    def _tell(self) -> None:
        if self._on_finished is None:
            return
        try:
            self._on_finished()
        except BaseException:  # noqa: BLE001 - the caller's fault costs a log line, not the lane
            _log.exception("on_finished raised; the %s lane goes on", self._direction.value)
