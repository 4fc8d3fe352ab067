"""Drives one tier as the core does, one call at a time, and never waits without a deadline."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.presence import PresenceSet
from kvtier_core.policies import PolicyFactory
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import JobResult, RequestInfo, TierContext, TierEvent, TierJob
from kvtier_testing.backends import Surroundings, open_backend
from kvtier_testing.calling import PATIENCE_S as PATIENCE_S  # noqa: PLC0414 - re-exported
from kvtier_testing.lent import GivenBuffers, Rows

_UNTOUCHED = b"\xa5"
_NAMES = {JobKind.LOOKUP: "lookup", JobKind.TIER_LOAD: "load", JobKind.TIER_STORE: "store"}


@dataclass(frozen=True)
class Loaded:
    """How a load ended: its result, and the rows of the keys that are neither missing nor failed."""

    result: JobResult
    rows: Mapping[OffloadKey, bytes]


class TierDriver:
    """One open tier. Use it as a context manager: leaving shuts the tier down."""

    def __init__(  # noqa: PLR0913 - a test gives what it cares for
        self,
        tier_class: type[Any],
        settings: TierSettings,
        *,
        row_bytes: int,
        namespace: str = "kit-namespace",
        capacity_bytes: int | None = None,
        name: str = "kit",
        policies: Mapping[str, PolicyFactory] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rows: Rows | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Build and open the tier. A ``BlockTier`` runs behind the core's own port, with these clocks.

        *policies* are eviction policies beside the core's own, by name. *capacity_bytes* stands for the ``capacity``
        setting: where unset, the tier type's own default holds. Without *rows* the buffers of jobs are handed to the
        tier as they are, and it sees no pool. A test fails when the tier has not answered within *patience_s*.
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
        )
        self._next_id = 1
        self._due: set[int] = set()
        self._results: dict[int, JobResult] = {}
        self._rows: Rows = GivenBuffers() if rows is None else rows
        self._lent: dict[int, tuple[str, Sequence[int]]] = {}
        """Of each job without a result: what it is, and its rows."""
        self._patience_s = patience_s
        surroundings = Surroundings(
            rows=self._rows,
            woken=self._woken.set,
            patience_s=patience_s,
            monotonic=monotonic,
            wall=wall,
        )
        self.backend: Any = open_backend(tier_class, settings, context, policies or {}, surroundings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.backend.hangs:
            self.shutdown()

    # Jobs in flight.

    def start_store(
        self, rows: Mapping[OffloadKey, bytes | bytearray | memoryview], *, deadline: float = float("inf")
    ) -> int:
        """Submit a store; returns the job's id. Without a pool a ``bytearray`` is handed over as it is."""
        buffers = [memoryview(row) for row in rows.values()]
        return self._submit(JobKind.TIER_STORE, self._job(list(rows), deadline), buffers)

    def start_load(
        self,
        keys: Sequence[OffloadKey],
        buffers: Sequence[bytearray | memoryview],
        *,
        deadline: float = float("inf"),
        arrived: Callable[[Sequence[int]], None] | None = None,
    ) -> int:
        """Submit a load into *buffers*, one a key; returns the job's id. *arrived* hears what the tier says early."""
        job = replace(self._job(keys, deadline), arrived=arrived)
        return self._submit(JobKind.TIER_LOAD, job, [memoryview(buffer) for buffer in buffers])

    def start_lookup(
        self, keys: Sequence[OffloadKey], *, deadline: float = float("inf"), is_prefix: bool = False
    ) -> int:
        """Submit a lookup; returns the job's id. An answer given at once is that job's result."""
        return self._submit(JobKind.LOOKUP, replace(self._job(keys, deadline), is_prefix=is_prefix), ())

    def wait(self, job_id: int) -> JobResult:
        """The result of one job. Fails when it does not come, comes twice, or another comes that is not due."""
        return self.wait_any([job_id])

    def wait_any(self, job_ids: Collection[int]) -> JobResult:
        """The result of the first of these jobs to have one, as ``wait``."""
        assert job_ids, "no job to wait for"
        give_up = time.monotonic() + self._patience_s
        while (ready := next((job_id for job_id in job_ids if job_id in self._results), None)) is None:
            strange = [job_id for job_id in job_ids if job_id not in self._due]
            assert not strange, f"jobs {strange} were never submitted, or their results have been waited for"
            self._woken.clear()
            self.collect()
            if self._results.keys().isdisjoint(job_ids):
                assert time.monotonic() < give_up, self._describe_wait(job_ids)
                self._woken.wait(self.poll_s)
        return self._results.pop(ready)

    def collect(self) -> None:
        """Take the results that are ready, without waiting."""
        for result in self.backend.collect():
            self._take(result)

    def unanswered(self) -> set[int]:
        """The ids of jobs whose result has not come."""
        self.collect()
        return set(self._due)

    def _describe_wait(self, job_ids: Collection[int]) -> str:
        jobs = ", ".join(self._lent[job_id][0] for job_id in sorted(job_ids) if job_id in self._lent)
        return f"no result of {jobs} within {self._patience_s:g} s: a call of the storage hangs, or a result is lost"

    def _job(self, keys: Sequence[OffloadKey], deadline: float) -> TierJob:
        job_id = self._next_id
        self._next_id += 1
        self._due.add(job_id)
        return TierJob(id=job_id, request=RequestInfo(request_id="kit"), keys=tuple(keys), deadline=deadline)

    def _submit(self, kind: JobKind, job: TierJob, buffers: Sequence[memoryview]) -> int:
        is_load = kind is JobKind.TIER_LOAD
        rows = self._rows.lend(buffers, is_load=is_load)
        self._lent[job.id] = f"the {_NAMES[kind]} {job.id}", rows
        views = [self._rows.row(row) if is_load else self._rows.row(row).toreadonly() for row in rows]
        self.backend.submit(kind, replace(job, rows=rows, buffers=tuple(views)))
        return job.id

    def _take(self, result: JobResult) -> None:
        assert isinstance(result, JobResult), f"not a JobResult: {result!r}"
        assert result.job_id in self._due, f"a result that is not due: {result!r}"
        self._due.remove(result.job_id)
        what, rows = self._lent.pop(result.job_id)
        self._rows.take_back(rows, what)
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

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Nobody waits for these jobs any more."""
        self.backend.cancel(job_ids)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks gave wrong bytes."""
        self.backend.discard(keys)

    def touch(self, keys: Sequence[OffloadKey], chain: int = 0) -> None:
        """These blocks were used from a warmer tier, by the request with the number *chain*."""
        self.backend.touch(keys, chain)

    def resident(self) -> PresenceSet | None:
        """The keys that the tier is known to hold without asking it; ``None`` where it has to be asked."""
        keys: PresenceSet | None = self.backend.resident()
        return keys

    def has(self, hook: str) -> bool:
        """Whether the tier can do what this optional hook stands for; a ``BlockTier`` can."""
        has: bool = self.backend.has(hook)
        return has

    def take_events(self) -> list[TierEvent]:
        """What changed in the tier since the last call."""
        return list(self.backend.take_events())

    def drain(self, timeout_s: float) -> list[int]:
        """The jobs that may still touch their buffers after *timeout_s*."""
        return list(self.backend.drain(timeout_s))

    def reset(self, namespace: str) -> None:
        """Let the tier serve *namespace* from now on. Raises ``TierOpenError``, or what a hook raises."""
        self.backend.reset(namespace, {"model": "kit", "namespace": namespace})

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """Shut the tier down. Whether it is down after *timeout_s*, or as long as the driver waits for any answer."""
        is_down: bool = self.backend.shutdown(self._patience_s if timeout_s is None else timeout_s)
        return is_down
