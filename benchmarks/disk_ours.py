"""Our tier in ``disk.py``: alone, with the core's proofs beside it, and without index and proofs.

Decides how the tier is driven, and what of it can be left out to see what that costs.
"""

import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from kvtier_core.coordinator.results import Finished
from kvtier_core.manager.integrity import Integrity
from kvtier_core.tier import OffloadKey
from kvtier_core.values import JobResult, RequestInfo, TierContext, TierJob
from kvtier_disk import DiskTier
from kvtier_disk.settings import DiskSettings
from kvtier_testing.bench.rows import NAMESPACE, Measured, Rows, timed
from kvtier_testing.driving import TierDriver

_ROUNDS_HELD = 4
_FILL = 1_000_000  # rounds of this number and above only fill the tier
_STOP_S = 60.0


class Ours:
    """The disk tier through the core's adapter, full before the first round, so that slots are recycled.

    Proofs are made before a store and checked after a load, which is not timed.
    """

    name = "ours"

    def __init__(self, directory: Path, threads: int) -> None:
        self._threads = threads
        self._root = directory / self.name
        self._tier_class = DiskTier
        self._driver: TierDriver | None = None

    def _opened(self, rows: Rows) -> TierDriver:
        if self._driver is None:
            values = {"type": "disk", "root": self._root, "min_free": 0, "threads": self._threads}
            self._driver = TierDriver(
                self._tier_class,
                DiskTier.Settings.model_validate(values),
                row_bytes=rows.row_bytes,
                namespace=NAMESPACE,
                capacity_bytes=int((_ROUNDS_HELD + 0.1) * rows.total_bytes) + (160 << 20),
            )
            # The tier wakes its host, as it does in the core: looking oftener only costs time.
            self._driver.poll_s = 1.0
            for number in range(_FILL, _FILL + _ROUNDS_HELD + 1):
                self._store(self._driver, rows, rows.keys(number))
            self._has_filled()
        return self._driver

    def _has_filled(self) -> None:
        """The tier is as full as it may be."""

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        driver, keys = self._opened(rows), rows.keys(number)
        rows.seal(keys)
        return timed(lambda: self._store(driver, rows, keys))

    def _store(self, driver: TierDriver, rows: Rows, keys: Sequence[OffloadKey]) -> None:
        store_all(driver, rows, keys)

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        driver, keys = self._opened(rows), rows.keys(number)
        rows.wipe()
        measured = timed(lambda: self._load(driver, rows, keys))
        rows.check(keys)
        return measured

    def _load(self, driver: TierDriver, rows: Rows, keys: Sequence[OffloadKey]) -> None:
        load_all(driver, rows, keys)

    def clear(self) -> None:
        """Nothing: what is stored is evicted in time."""

    def close(self) -> None:
        """Leave nothing."""
        if self._driver is not None:
            self._driver.shutdown()
        shutil.rmtree(self._root, ignore_errors=True)


class OursWithProofs(Ours):
    """With proofs made and checked meanwhile, on the core's own threads."""

    name = "ours_with_proofs"

    def __init__(self, directory: Path, threads: int) -> None:
        super().__init__(directory, threads)
        self._checked: SimpleQueue[object] = SimpleQueue()
        self._integrity: Integrity | None = None

    def _proving(self, rows: Rows) -> Integrity:
        if self._integrity is None:
            self._integrity = Integrity(
                rows.pool,
                [rows.payload_bytes],
                emit=self._checked.put,
                discard=lambda _tier, _keys, _sealer: None,
                log=logging.getLogger("kvtier.bench"),
                check_threads=2,
            )
        return self._integrity

    def _store(self, driver: TierDriver, rows: Rows, keys: Sequence[OffloadKey]) -> None:
        integrity = self._proving(rows)
        submitted: SimpleQueue[int] = SimpleQueue()
        made = [_tier_job(keys, job) for job in rows.jobs()]
        for tier_job, job in zip(made, rows.jobs(), strict=True):
            integrity.seal(rows.sealer, tier_job)
            integrity.after_sealing(partial(_submit_later, submitted, driver, rows, keys, job))
        for _ in made:
            _good(driver.wait(submitted.get()))

    def _load(self, driver: TierDriver, rows: Rows, keys: Sequence[OffloadKey]) -> None:
        integrity = self._proving(rows)
        loads: dict[int, int] = {}
        for job in rows.jobs():
            tier_job = integrity.begin("bench", _tier_job(keys, job), rows.sealer, is_ours=True)
            buffers = [rows.view(index) for index in job]
            loads[driver.start_load(tier_job.keys, buffers, arrived=tier_job.arrived)] = tier_job.id
        count = len(loads)
        while loads:
            result = driver.wait_any(loads)
            integrity.finish(replace(result, job_id=loads.pop(result.job_id)))
        for _ in range(count):
            while not isinstance(event := self._checked.get(), Finished):
                pass  # what was sealed
            _good(event.result)
            if event.corrupt:
                raise RuntimeError(f"{len(event.corrupt)} blocks came back wrong")

    def close(self) -> None:
        """Leave nothing."""
        super().close()
        if self._integrity is not None:
            self._integrity.stop(_STOP_S)


class OursPlain(Ours):
    """Without the index, once the tier is full: what is where is known in memory alone. And without proofs."""

    name = "ours_plain"

    def __init__(self, directory: Path, threads: int) -> None:
        super().__init__(directory, threads)
        self._tier_class = _PlainTier

    def _has_filled(self) -> None:
        _PlainTier.latest.forget_index()


class _PlainTier(DiskTier):
    """Can be made to go on without its index."""

    latest: "_PlainTier"

    def __init__(self, settings: DiskSettings, context: TierContext) -> None:
        super().__init__(settings, context)
        self._following = threading.Lock()
        self._has_index = True
        _PlainTier.latest = self

    def follow(self) -> None:
        with self._following:
            if self._has_index:  # what it says would be out of date
                super().follow()

    def forget_index(self) -> None:
        with self._following:
            opened = self._opened().opened
            index: Any = _NoIndex(opened.member.index)
            opened.member = replace(opened.member, index=index)
            self._has_index = False


class _NoIndex:
    """Gives out the slots of what is evicted, and writes nothing down. The rest is the index's."""

    def __init__(self, index: Any) -> None:  # noqa: ANN401 - the tier's own
        self._index = index
        self._free: list[int] = []
        self._lock = threading.Lock()
        self.database = _Unchanged(index.database)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._index, name)

    def claim(
        self,
        _namespace: int,
        _owner: int,
        count: int,
        victims: Callable[[int], Sequence[tuple[OffloadKey, int]]] | None = None,
    ) -> list[int]:
        with self._lock:
            if len(self._free) < count and victims is not None:
                self._free = sorted(self._free + [place for _, place in victims(count - len(self._free))])
            places, self._free = self._free[:count], self._free[count:]
            return places

    def publish(
        self, _namespace: int, _owner: int, stored: Sequence[object], _replaced: object, _now: float
    ) -> list[bool]:
        return [True] * len(stored)


class _Unchanged:
    """A database that nobody else changes."""

    def __init__(self, database: Any) -> None:  # noqa: ANN401
        self._database = database
        self._version = database.version()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._database, name)

    def version(self) -> int:
        version: int = self._version
        return version


def store_all(driver: TierDriver, rows: Rows, keys: Sequence[OffloadKey]) -> None:
    """Store all rows, job by job, and wait for them."""
    jobs = [_submit(driver, rows, keys, job) for job in rows.jobs()]
    for job_id in jobs:
        _good(driver.wait(job_id))


def load_all(driver: TierDriver, rows: Rows, keys: Sequence[OffloadKey]) -> None:
    """Load all rows, job by job, and wait for them."""
    jobs = [
        driver.start_load([keys[index] for index in job], [rows.view(index) for index in job])
        for job in rows.jobs()
    ]
    for job_id in jobs:
        _good(driver.wait(job_id))


def _tier_job(keys: Sequence[OffloadKey], job: range) -> TierJob:
    return TierJob(
        id=job.start,
        request=RequestInfo(request_id="bench"),
        keys=tuple(keys[index] for index in job),
        rows=tuple(job),
        deadline=float("inf"),
    )


def _submit(driver: TierDriver, rows: Rows, keys: Sequence[OffloadKey], job: range) -> int:
    return driver.start_store({keys[index]: rows.view(index) for index in job})


def _submit_later(
    submitted: "SimpleQueue[int]", driver: TierDriver, rows: Rows, keys: Sequence[OffloadKey], job: range
) -> None:
    submitted.put(_submit(driver, rows, keys, job))


def _good(result: JobResult) -> None:
    if result.error is not None or result.missing or result.failed:
        raise RuntimeError(result.error or f"{len(result.missing) + len(result.failed)} blocks are missing")
