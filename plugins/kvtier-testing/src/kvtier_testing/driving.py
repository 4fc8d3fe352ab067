"""Drives one tier through the hook specs as the core does, one call at a time, and never waits without a deadline."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import pluggy

from kvtier_core.blocktier import BlockTier
from kvtier_core.hookspecs import PROJECT, TierHookSpecs
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking import BlockTierAdapter
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import JobResult, RequestInfo, TierContext, TierEvent, TierJob, TierUsage

PATIENCE_S = 60.0
"""How long a result may take before its test fails: long, so that a busy machine fails none."""

_UNTOUCHED = b"\xa5"


@dataclass(frozen=True)
class Loaded:
    """How a load ended: its result, and the rows of the keys that are neither missing nor failed."""

    result: JobResult
    rows: Mapping[OffloadKey, bytes]


class TierDriver:
    """One open tier. Use it as a context manager: leaving shuts the tier down."""

    def __init__(
        self,
        tier_class: type[Any],
        settings: TierSettings,
        *,
        row_bytes: int,
        namespace: str = "kit-namespace",
        capacity_bytes: int | None = None,
        name: str = "kit",
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Build and open the tier. A ``BlockTier`` is wrapped as the core wraps it, with these clocks.

        *capacity_bytes* stands for the ``capacity`` setting: where unset, the tier type's own default holds.
        """
        self._woken = threading.Event()
        self.poll_s = 0.01
        """How often ``wait`` looks for results, in seconds, where the tier does not call ``wake``."""
        self.row_bytes = row_bytes
        context = TierContext(
            name=name,
            namespace=namespace,
            description={"model": "kit", "namespace": namespace},
            row_bytes=row_bytes,
            capacity_bytes=tier_class.info.resolve_capacity(capacity_bytes),
            wake=self._woken.set,
        )
        self.plugin: Any = (
            BlockTierAdapter(tier_class, settings, context, monotonic=monotonic, wall=wall)
            if issubclass(tier_class, BlockTier)
            else tier_class(settings, context)
        )
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(TierHookSpecs)
        manager.register(self.plugin)
        manager.check_pending()
        self.hooks: Any = manager.hook
        self._next_id = 1
        self._due: set[int] = set()
        self._results: dict[int, JobResult] = {}
        self.hooks.on_open(pool=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # Jobs in flight.

    def start_store(
        self, rows: Mapping[OffloadKey, bytes | bytearray | memoryview], *, deadline: float = float("inf")
    ) -> int:
        """Submit a store; returns the job's id. A ``bytearray`` is handed over as it is, so that it can be changed."""
        buffers = [memoryview(row).toreadonly() for row in rows.values()]
        job = self._job(list(rows), buffers, deadline)
        self.hooks.submit_store(job=job)
        return job.id

    def start_load(
        self,
        keys: Sequence[OffloadKey],
        buffers: Sequence[bytearray | memoryview],
        *,
        deadline: float = float("inf"),
        arrived: Callable[[Sequence[int]], None] | None = None,
    ) -> int:
        """Submit a load into *buffers*, one a key; returns the job's id. *arrived* hears what the tier says early."""
        job = self._job(keys, [memoryview(buffer) for buffer in buffers], deadline, arrived)
        self.hooks.submit_load(job=job)
        return job.id

    def start_lookup(
        self, keys: Sequence[OffloadKey], *, deadline: float = float("inf"), is_prefix: bool = False
    ) -> int:
        """Submit a lookup; returns the job's id. An answer given at once is that job's result."""
        job = replace(self._job(keys, (), deadline), is_prefix=is_prefix)
        present = self.hooks.lookup(job=job)
        if present is not None:
            self._take(JobResult(job_id=job.id, present=present))
        return job.id

    def wait(self, job_id: int) -> JobResult:
        """The result of one job. Fails when it does not come, comes twice, or another comes that is not due."""
        return self.wait_any([job_id])

    def wait_any(self, job_ids: Collection[int]) -> JobResult:
        """The result of the first of these jobs to have one, as ``wait``."""
        assert job_ids, "no job to wait for"
        give_up = time.monotonic() + PATIENCE_S
        while (ready := next((job_id for job_id in job_ids if job_id in self._results), None)) is None:
            strange = [job_id for job_id in job_ids if job_id not in self._due]
            assert not strange, f"jobs {strange} were never submitted, or their results have been waited for"
            self._woken.clear()
            self.collect()
            if self._results.keys().isdisjoint(job_ids):
                assert time.monotonic() < give_up, f"no result of jobs {list(job_ids)} after {PATIENCE_S} s"
                self._woken.wait(self.poll_s)
        return self._results.pop(ready)

    def collect(self) -> None:
        """Take the results that are ready, without waiting."""
        for result in self.hooks.get_finished_jobs() or ():
            self._take(result)

    def unanswered(self) -> set[int]:
        """The ids of jobs whose result has not come."""
        self.collect()
        return set(self._due)

    def _job(
        self,
        keys: Sequence[OffloadKey],
        buffers: Sequence[memoryview],
        deadline: float,
        arrived: Callable[[Sequence[int]], None] | None = None,
    ) -> TierJob:
        job_id = self._next_id
        self._next_id += 1
        self._due.add(job_id)
        return TierJob(
            id=job_id,
            request=RequestInfo(request_id="kit"),
            keys=tuple(keys),
            rows=tuple(range(len(buffers))),
            buffers=tuple(buffers),
            deadline=deadline,
            arrived=arrived,
        )

    def _take(self, result: JobResult) -> None:
        assert isinstance(result, JobResult), f"not a JobResult: {result!r}"
        assert result.job_id in self._due, f"a result that is not due: {result!r}"
        self._due.remove(result.job_id)
        self._results[result.job_id] = result

    # Whole jobs.

    def store(self, rows: Mapping[OffloadKey, bytes | bytearray]) -> JobResult:
        """Store rows and wait."""
        return self.wait(self.start_store(rows))

    def load(self, keys: Sequence[OffloadKey]) -> Loaded:
        """Load keys into buffers of their own and wait."""
        buffers = [bytearray(_UNTOUCHED * self.row_bytes) for _ in keys]
        result = self.wait(self.start_load(keys, buffers))
        without = {*result.missing, *result.failed}
        if result.error is not None and not without:
            without = set(keys)
        rows = {key: bytes(buffer) for key, buffer in zip(keys, buffers, strict=True) if key not in without}
        return Loaded(result=result, rows=rows)

    def lookup(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Look keys up and wait; one bool a key. Fails when the answer has another length or type, or is a fault."""
        result = self.wait(self.start_lookup(keys))
        assert result.error is None, f"the lookup failed: {result.error}"
        assert isinstance(result.present, Sequence), f"a lookup was answered with {result.present!r}"
        assert len(result.present) == len(keys), f"{len(result.present)} answers for {len(keys)} keys"
        told = [answer for answer in result.present if isinstance(answer, bool)]
        assert len(told) == len(keys), f"not bools: {result.present!r}"
        return told

    # The rest.

    def usage(self) -> TierUsage | None:
        """What ``get_usage`` says."""
        usage: TierUsage | None = self.hooks.get_usage()
        return usage

    def take_events(self) -> list[TierEvent]:
        """What ``take_events`` says."""
        return list(self.hooks.take_events() or ())

    def reset(self, namespace: str) -> None:
        """Let the tier serve *namespace* from now on."""
        self.hooks.reset(namespace=namespace, description={"model": "kit", "namespace": namespace})

    def shutdown(self, timeout_s: float = PATIENCE_S) -> None:
        """Shut the tier down."""
        self.hooks.shutdown(timeout_s=timeout_s)
