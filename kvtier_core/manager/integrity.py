"""Proofs (C03) are made and checked here, on threads of the core: never on the engine's, nor on a tier's.

Whoever loads on a thread of the core checks there too, while the bytes are in its cache. Other rows are checked, and
all rows are sealed, on threads that do nothing else.

What must not overtake a store waits in line on the one sealing thread: store jobs, ends of requests, resets.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from queue import SimpleQueue

from kvtier_core.coordinator.results import Finished
from kvtier_core.keys import OffloadKey, get_offload_group_idx
from kvtier_core.manager.events import Event, Sealed
from kvtier_core.proof import Sealer
from kvtier_core.transfer.pool import Pool
from kvtier_core.values import JobResult, TierJob


class WorkThreads:
    """Daemon threads that run callables in the order posted; where it is one, each after the end of the one before."""

    def __init__(self, name: str, log: logging.Logger, count: int = 1) -> None:
        self._log = log
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Begin *work* after everything posted before."""
        self._queue.put(work)

    def stop(self, timeout_s: float) -> bool:
        """Finish what was posted, then end. Whether that was within *timeout_s*. Twice is fine."""
        deadline = time.monotonic() + timeout_s
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:  # noqa: BLE001 - a mistake of ours must not cost what waits behind it
                self._log.exception("%s failed; its rows stay out of use: please report this", work)


class LoadCheck:
    """One load job: which of its blocks the tier said have arrived, and which of these were found right. Any thread."""

    def __init__(self, tier: str, job: TierJob, sealer: Sealer, *, is_ours: bool) -> None:
        self.tier = tier
        self.job = job
        self.sealer = sealer
        self.is_ours = is_ours
        """Whether it is told of on threads of the core, which may check."""
        self._lock = threading.Lock()  # guards the three below
        self._has_ended = False
        self._told: Counter[int] = Counter()
        self._right: set[int] = set()

    def tell(self, positions: Sequence[int]) -> list[int]:
        """The tier says that these have arrived. Returns those that it had not named before, none after ``end``.

        A block that is named again may have been touched again: it is checked with the result.
        """
        with self._lock:
            if self._has_ended:
                return []
            fresh = [position for position in dict.fromkeys(positions) if position not in self._told]
            self._told.update(positions)
            return fresh

    def found_right(self, positions: Iterable[int]) -> None:
        """The proofs of these hold."""
        with self._lock:
            self._right.update(positions)

    def end(self) -> None:
        """The tier has answered the job: what it tells later counts for nothing."""
        with self._lock:
            self._has_ended = True

    def proven(self) -> set[int]:
        """The positions that need no further look."""
        with self._lock:
            return {position for position in self._right if self._told[position] == 1}


class Integrity:
    """Seals rows before they leave the pool and checks rows that came in."""

    def __init__(
        self,
        pool: Pool,
        payload_bytes: Sequence[int],
        *,
        emit: Callable[[Event], None],
        discard: Callable[[str, Sequence[OffloadKey], Sealer], None],
        log: logging.Logger,
        check_threads: int,
    ) -> None:
        self._pool = pool
        self._payload_bytes = payload_bytes
        self._emit = emit
        self._discard = discard
        self._lock = threading.Lock()  # guards the one below
        self._loads: dict[int, LoadCheck] = {}
        """Loads that a tier has, or whose rows are being checked."""
        self._sealing = WorkThreads("kvtier-seal", log)
        self._checking = WorkThreads("kvtier-check", log, check_threads)

    def seal(self, sealer: Sealer, job: TierJob) -> None:
        """Give each row of *job* its proof, after everything posted before, and report it as ``Sealed``."""
        self._sealing.post(partial(self._seal, sealer, job))

    def after_sealing(self, work: Callable[[], None]) -> None:
        """Run *work*, which must not wait, after everything posted before."""
        self._sealing.post(work)

    def begin(self, tier: str, job: TierJob, sealer: Sealer, *, is_ours: bool) -> TierJob:
        """A load that is to be checked with *sealer* goes to *tier*. Returns the job as the tier gets it.

        With *is_ours* rows are checked on the thread that tells of them, which is the core's.
        """
        load = LoadCheck(tier, job, sealer, is_ours=is_ours)
        with self._lock:
            self._loads[job.id] = load
        return replace(job, arrived=partial(self._verify_here if is_ours else self._verify_early, load))

    def arrived(self, job_id: int) -> Sequence[OffloadKey]:
        """The keys of a load that are in their rows by now, whole and checked, though its tier may not be done."""
        with self._lock:
            load = self._loads.get(job_id)
        return () if load is None else [load.job.keys[position] for position in load.proven()]

    def finish(self, result: JobResult) -> None:
        """Report how a job of a tier ended; the rows that a load says it has filled are checked before."""
        with self._lock:
            load = self._loads.get(result.job_id)
        if load is None:
            self._emit(Finished(result))
        else:
            load.end()
            if load.is_ours:
                self._check(load, result)
            else:
                self._checking.post(partial(self._check, load, result))

    def _verify_here(self, load: LoadCheck, positions: Sequence[int]) -> None:
        """Check some rows of *load*, which the core itself has just filled."""
        self._check_early(load, load.tell(positions))

    def _verify_early(self, load: LoadCheck, positions: Sequence[int]) -> None:
        """Check some rows of *load* before its result is there. What is wrong then is checked again with the result.

        Each row is looked at once, however often it is named, so that no tier can hold up the checks of others. A look
        that is not over when the result comes is made again, and then counts for nothing. Raises ``TypeError`` or
        ``ValueError`` for what are no positions of it.
        """
        known = range(len(load.job.keys))
        early = tuple(islice(positions, len(known) + 1))
        if len(early) > len(known):
            raise ValueError(f"more positions than the job has blocks ({len(known)})")
        for position in early:
            if type(position) is not int or position not in known:
                raise ValueError(f"{position!r} is no position of a block in a job of {len(known)}")
        if fresh := load.tell(early):
            self._checking.post(partial(self._check_early, load, fresh))

    def stop(self, timeout_s: float) -> bool:
        """End all threads after what was posted; whether that was within *timeout_s* each way."""
        return all([self._sealing.stop(timeout_s), self._checking.stop(timeout_s)])

    def _payload(self, key: OffloadKey) -> int:
        return self._payload_bytes[get_offload_group_idx(key)]

    def _seal(self, sealer: Sealer, job: TierJob) -> None:
        for key, row in zip(job.keys, job.rows, strict=True):
            sealer.seal(key, self._pool.row(row), self._payload(key))
        self._emit(Sealed(job.id))

    def _check_early(self, load: LoadCheck, positions: Sequence[int]) -> None:
        load.found_right([position for position in positions if self._is_right(load, position)])

    def _is_right(self, load: LoadCheck, position: int) -> bool:
        # The rows are asked of the pool: the job's own buffers have been in the tier's hands.
        key, row = load.job.keys[position], load.job.rows[position]
        return load.sealer.check(key, self._pool.row(row), self._payload(key))

    def _check(self, load: LoadCheck, result: JobResult) -> None:
        job, proven = load.job, load.proven()
        not_loaded = {*result.missing, *result.failed}
        if result.error is not None and not not_loaded:
            not_loaded = set(job.keys)
        corrupt = [
            key
            for position, key in enumerate(job.keys)
            if key not in not_loaded and position not in proven and not self._is_right(load, position)
        ]
        if corrupt:
            self._discard(load.tier, corrupt, load.sealer)
        with self._lock:
            del self._loads[job.id]
        self._emit(Finished(result, corrupt))
