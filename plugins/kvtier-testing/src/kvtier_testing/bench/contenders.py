"""Ways to store and load the rows of a round in a configured tier: through kvtier, and by the tier's own methods."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvtier_core.blocktier import SupportsBatch
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.errors import KvtierError
from kvtier_core.manager import TierManager
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_core.policies import LRU
from kvtier_core.values import RequestInfo
from kvtier_testing.bench.rows import Measured, Rows, timed
from kvtier_testing.configured import ConfiguredTier

if TYPE_CHECKING:
    from kvtier_core.keys import OffloadKey

_PASS_S = 300.0
"""Longer than any pass of a tier that is worth to be measured."""
_CLOSE_S = 30.0


class ThroughKvtier:
    """As an engine uses the tier: pool, proofs, queue, threads, limits."""

    name = "kvtier"

    def __init__(self, tier: ConfiguredTier, token: str, row_bytes: int, payload_bytes: int) -> None:
        self._tier = tier
        self._row_bytes = row_bytes
        self._namespace = Namespace(
            model=f"kvtier-bench-{token}",
            kv_dtype="uint8",
            tokens_per_block=1,
            groups=(GroupSpec(layers=("bench",), block_bytes=payload_bytes),),
            layout="bench",
        )
        self.namespace = self._namespace.name
        self._manager: TierManager | None = None
        self._last: Sequence[OffloadKey] = ()

    def _opened(self, rows: Rows) -> TierManager:
        if self._manager is None:
            build = self._tier.plan(self._row_bytes)
            # All rows of a pass are under way at a time. An engine with a pool of four times their size allows it too.
            limits = build.limits.model_copy(update={"max_cascade": 1.0, "open_retry": None})
            self._manager = TierManager(
                pool=rows.pool,
                namespace=self._namespace,
                tiers=[replace(build, limits=limits)],
                policy=LRU(),
                limits=PoolLimits(max_promotion_rows=rows.count, max_cascade_rows=rows.count),
                reset_tiers=False,
            )
            self._manager.open(_PASS_S)
        return self._manager

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        manager = self._opened(rows)
        manager.reset_cache()
        keys = self._last = rows.keys(number)
        request = RequestInfo(request_id=f"store {number}")
        counted = manager.counters.tiers[self._tier.name]
        before = counted.stored

        def work() -> None:
            manager.new_request(request)
            for job in rows.jobs():
                prepared = manager.reserve_store(request.request_id, keys[job.start : job.stop])
                assert prepared is not None, "the pool has a row for each block"
                manager.commit_store(prepared.job_id, success=True)
            manager.request_finished(request.request_id)
            manager.end_step()
            _wait(manager, lambda: not manager.has_pending_work)

        measured = timed(work)
        _require_all("stored", counted.stored - before, rows.count)
        return measured

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        manager = self._opened(rows)
        keys = rows.keys(number)
        rows.wipe()
        manager.reset_cache()
        request = RequestInfo(request_id=f"load {number}")
        found = 0

        def is_settled() -> bool:
            answer = manager.lookup(request.request_id, [keys])
            manager.end_step()
            return answer.is_settled

        def work() -> None:
            nonlocal found
            manager.new_request(request)
            _wait(manager, is_settled)
            prepared = manager.reserve_load(request.request_id, keys)
            found = len(prepared.keys)
            if prepared.keys:
                manager.commit_load(prepared.job_id)
            manager.request_finished(request.request_id)

        measured = timed(work)
        _require_all("loaded", found, rows.count)
        return measured

    def clear(self) -> None:
        """Delete what the round stored."""
        self._tier.delete(self.namespace, self._row_bytes, self._last)

    def close(self) -> None:
        """Close the tier."""
        if self._manager is not None:
            self._manager.shutdown(_CLOSE_S)


class TierAlone:
    """The tier's own methods, called by as many threads as it is given in kvtier, with a job's blocks each."""

    name = "tier alone"

    def __init__(self, tier: ConfiguredTier, namespace: str, row_bytes: int) -> None:
        self._tier = tier
        self._row_bytes = row_bytes
        self.namespace = namespace
        self._threads = ThreadPoolExecutor(tier.settings.tiers[tier.name].threads)
        self._instance: Any = None
        self._last: Sequence[OffloadKey] = ()

    def _opened(self) -> Any:  # noqa: ANN401 - a tier
        if self._instance is None:
            self._instance = self._tier.make(self.namespace, self._row_bytes)
            self._instance.open()
        return self._instance

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        tier = self._opened()
        keys = self._last = rows.keys(number)
        rows.seal(keys)

        def store(job: range) -> int:
            views = [rows.view(index).toreadonly() for index in job]
            if isinstance(tier, SupportsBatch):
                return _count(tier.store_many(keys[job.start : job.stop], views))
            for index, view in zip(job, views, strict=True):
                tier.store(keys[index], view)
            return len(job)

        return self._timed("stored", rows, store)

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        tier = self._opened()
        keys = rows.keys(number)
        rows.wipe()

        def load(job: range) -> int:
            views = [rows.view(index) for index in job]
            if isinstance(tier, SupportsBatch):
                return _count(tier.load_many(keys[job.start : job.stop], views))
            return _count([tier.load(keys[index], view) for index, view in zip(job, views, strict=True)])

        measured = self._timed("loaded", rows, load)
        rows.check(keys)
        return measured

    def _timed(self, what: str, rows: Rows, work: Callable[[range], int]) -> Measured:
        moving: list[Future[int]] = []

        def all_jobs() -> None:
            moving.extend(self._threads.submit(work, job) for job in rows.jobs())
            if wait_for(moving, _PASS_S).not_done:
                raise KvtierError(f"a call of the tier did not return within {_PASS_S:g} s")

        measured = timed(all_jobs)
        _require_all(what, sum(job.result() for job in moving), rows.count)
        return measured

    def clear(self) -> None:
        """Delete what the round stored."""
        self._instance.delete(self._last)

    def close(self) -> None:
        """Close the tier."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._instance is not None:
            with suppress(Exception):  # what was measured holds
                self._instance.close()


def _wait(manager: TierManager, is_done: Callable[[], bool]) -> None:
    give_up = monotonic() + _PASS_S
    while not is_done():
        if monotonic() > give_up:
            raise KvtierError(f"the tier did not answer within {_PASS_S:g} s")
        manager.wait(give_up - monotonic())


def _count(answers: Sequence[bool | Exception]) -> int:
    """How many keys were moved. Raises the first exception that is an answer."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers.count(True)


def _require_all(what: str, count: int, wanted: int) -> None:
    if count != wanted:
        raise KvtierError(
            f"{count} of {wanted} blocks were {what}: the others failed, or found no room, or took longer than "
            "[tiers.NAME.limits] allow; see the warnings, or measure fewer with --bytes"
        )
