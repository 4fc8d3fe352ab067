"""Proofs (C03) are made and checked here, on two threads of their own: never on the engine's, nor on a tier's.

The sealing thread is also the one line in which everything that must not overtake a store waits: the store jobs
themselves, the news that a request is finished, and resets.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from kvtier_core.coordinator import Finished, JobPlan
from kvtier_core.keys import OffloadKey, get_offload_group_idx
from kvtier_core.manager.events import Sealed
from kvtier_core.proof import Sealer
from kvtier_core.transfer.pool import Pool
from kvtier_core.values import JobResult


class WorkThread:
    """A daemon thread that runs callables one after another."""

    def __init__(self, name: str, log: logging.Logger) -> None:
        self._log = log
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Run *work* after everything posted before."""
        self._queue.put(work)

    def stop(self, timeout_s: float) -> bool:
        """Finish what was posted, then end. Whether that was within *timeout_s*. Twice is fine."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:  # noqa: BLE001 - a mistake of ours must not cost what waits behind it
                self._log.exception("%s failed; its rows stay out of use: please report this", work)


class LoadCheck:
    """One load job, and which of its rows were found right so far."""

    def __init__(self, plan: JobPlan, sealer: Sealer) -> None:
        self.plan = plan
        self.sealer = sealer
        self.right: set[int] = set()
        """Positions. Of the checking thread."""


class Integrity:
    """Seals rows before they leave the pool and checks rows that came in."""

    def __init__(
        self,
        pool: Pool,
        payload_bytes: Sequence[int],
        *,
        emit: Callable[[Finished | Sealed], None],
        discard: Callable[[str, Sequence[OffloadKey]], None],
        log: logging.Logger,
    ) -> None:
        self._pool = pool
        self._payload_bytes = payload_bytes
        self._emit = emit
        self._discard = discard
        self._log = log
        self._sealing = WorkThread("kvtier-seal", log)
        self._checking = WorkThread("kvtier-check", log)

    def seal(self, sealer: Sealer, plan: JobPlan) -> None:
        """Give each row of *plan* its proof, after everything posted before, and report it as ``Sealed``."""
        self._sealing.post(partial(self._seal, sealer, plan))

    def after_sealing(self, work: Callable[[], None]) -> None:
        """Run *work*, which must not wait, after everything posted before."""
        self._sealing.post(work)

    def verify(self, load: LoadCheck, result: JobResult) -> None:
        """Check the rows of *load* that *result* says are loaded, but for those found right before, and report it."""
        self._checking.post(partial(self._check, load, result))

    def verify_early(self, load: LoadCheck, positions: Sequence[int]) -> None:
        """Check some rows of *load* before its result is there. What is wrong then is checked again with the result.

        Raises ``TypeError`` or ``ValueError`` for what are no positions of it.
        """
        known = range(len(load.plan.keys))
        early = tuple(positions)
        for position in early:
            if type(position) is not int or position not in known:
                raise ValueError(f"{position!r} is no position of a block in a job of {len(known)}")
        self._checking.post(partial(self._check_early, load, early))

    def stop(self, timeout_s: float) -> bool:
        """End both threads after what was posted; whether that was within *timeout_s* each."""
        return all([self._sealing.stop(timeout_s), self._checking.stop(timeout_s)])

    def _payload(self, key: OffloadKey) -> int:
        return self._payload_bytes[get_offload_group_idx(key)]

    def _seal(self, sealer: Sealer, plan: JobPlan) -> None:
        for key, row in zip(plan.keys, plan.rows, strict=True):
            sealer.seal(key, self._pool.row(row), self._payload(key))
        self._emit(Sealed(plan.id))

    def _check_early(self, load: LoadCheck, positions: Sequence[int]) -> None:
        load.right.update(position for position in positions if self._is_right(load, position))

    def _is_right(self, load: LoadCheck, position: int) -> bool:
        # The rows are asked of the pool anew: the job's own buffers have been in the tier's hands.
        key, row = load.plan.keys[position], load.plan.rows[position]
        return load.sealer.check(key, self._pool.row(row), self._payload(key))

    def _check(self, load: LoadCheck, result: JobResult) -> None:
        plan = load.plan
        not_loaded = {*result.missing, *result.failed}
        if result.error is not None and not not_loaded:
            not_loaded = set(plan.keys)
        corrupt = [
            key
            for position, key in enumerate(plan.keys)
            if key not in not_loaded and position not in load.right and not self._is_right(load, position)
        ]
        if corrupt:
            self._log.warning(
                "tier %r returned %d of %d blocks with wrong bytes (first key %s): recomputed, and discarded there",
                plan.tier,
                len(corrupt),
                len(plan.keys),
                corrupt[0].hex()[:16],
            )
            self._discard(plan.tier, corrupt)
        self._emit(Finished(plan.tier, result, corrupt))
