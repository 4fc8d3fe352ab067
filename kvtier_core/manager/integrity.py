"""Proofs (C03) are made and checked here, on two threads of their own: never on the engine's, nor on a tier's.

The sealing thread is also the one line in which everything that must not overtake a store waits: the store jobs
themselves, the news that a request is finished, and resets.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from queue import SimpleQueue

from kvtier_core.coordinator import Finished, JobPlan
from kvtier_core.keys import OffloadKey, get_offload_group_idx
from kvtier_core.manager.events import Sealed
from kvtier_core.proof import PROOF_BYTES, Sealer
from kvtier_core.transfer.pool import Pool
from kvtier_core.values import JobResult

_NO_PROOF = bytes(PROOF_BYTES)


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
    """One load job: which of its blocks the tier said have arrived, and which of these were found right."""

    def __init__(self, plan: JobPlan, sealer: Sealer) -> None:
        self.plan = plan
        self.sealer = sealer
        self.right: set[int] = set()
        """Positions. Of the checking thread."""
        self._lock = threading.Lock()  # guards the three below
        self._told: set[int] = set()
        self._doubtful: set[int] = set()
        self._ended = False

    def tell(self, positions: Sequence[int]) -> list[int]:
        """The tier says that these have arrived. Returns those that it had not named before, none after ``end``.

        A block that is named again was touched again, as far as anybody knows: it has to be checked with the result.
        From any thread.
        """
        with self._lock:
            if self._ended:
                return []
            fresh = [position for position in dict.fromkeys(positions) if position not in self._told]
            if len(fresh) < len(positions):
                self._doubtful.update(set(positions).difference(fresh))
            self._told.update(fresh)
            return fresh

    def end(self) -> None:
        """The tier has answered the job, or will not: what it says of blocks from now on counts for nothing."""
        with self._lock:
            self._ended = True

    def is_proven(self, position: int) -> bool:
        """Whether the block needs no further look, once the job has ended. Of the checking thread."""
        with self._lock:
            return position in self.right and position not in self._doubtful


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

    def begin(self, load: LoadCheck) -> None:
        """Break the proofs that the rows of *load* still hold, before its tier gets them.

        A row may hold the very block that is to be loaded, from an earlier time: a tier that says that it has arrived
        and writes it only then would be believed, whatever it writes.
        """
        for row in load.plan.rows:
            self._pool.row(row)[-PROOF_BYTES:] = _NO_PROOF

    def verify(self, load: LoadCheck, result: JobResult) -> None:
        """Check the rows of *load* that *result* says are loaded, but for those found right before, and report it."""
        load.end()
        self._checking.post(partial(self._check, load, result))

    def verify_early(self, load: LoadCheck, positions: Sequence[int]) -> None:
        """Check some rows of *load* before its result is there. What is wrong then is checked again with the result.

        Each row is looked at once, however often it is named, so that no tier can hold up the checks of others. Raises
        ``TypeError`` or ``ValueError`` for what are no positions of it.
        """
        known = range(len(load.plan.keys))
        early = tuple(islice(positions, len(known) + 1))
        if len(early) > len(known):
            raise ValueError(f"more positions than the job has blocks ({len(known)})")
        for position in early:
            if type(position) is not int or position not in known:
                raise ValueError(f"{position!r} is no position of a block in a job of {len(known)}")
        if fresh := load.tell(early):
            self._checking.post(partial(self._check_early, load, fresh))

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
            if key not in not_loaded and not load.is_proven(position) and not self._is_right(load, position)
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
