"""The two ways to a tier that ``TierDriver`` knows: through the port, for a ``BlockTier``, and through the hooks."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import pluggy

from kvtier_core.blocktier import BlockTier
from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.errors import TierOpenError
from kvtier_core.hookspecs import PROJECT, TierHookSpecs
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking import BlockingTier
from kvtier_core.manager.events import Event, OpenFailed, Serving
from kvtier_core.manager.guard import Guard, TierIdentity
from kvtier_core.manager.port import TierHome
from kvtier_core.manager.presence import PresenceSet, ReportedContents
from kvtier_core.policies import PolicyFactory
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import JobResult, TierContext, TierEvent, TierJob
from kvtier_testing.calling import CallThread, HangError
from kvtier_testing.lent import Rows
from kvtier_testing.raised import note_raised


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a test lends to a tier."""

    rows: Rows
    woken: Callable[[], None]
    """Called when the tier has a result."""
    patience_s: float
    monotonic: Callable[[], float]
    wall: Callable[[], float]


class Backend(Protocol):
    """One open tier."""

    @property
    def hangs(self) -> bool:
        """Whether a call has not returned, so that none can follow."""

    def submit(self, kind: JobKind, job: TierJob) -> None:
        """Hand a job with buffers to the tier."""

    def collect(self) -> Sequence[JobResult]:
        """The results that are ready, without waiting."""

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Nobody waits for these jobs any more."""

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks gave wrong bytes."""

    def touch(self, keys: Sequence[OffloadKey], chain: int) -> None:
        """These blocks were used from a warmer tier."""

    def resident(self) -> PresenceSet | None:
        """The keys that the tier is known to hold without asking it."""

    def has(self, hook: str) -> bool:
        """Whether the tier can do what this optional hook stands for."""

    def take_events(self) -> Sequence[TierEvent]:
        """What changed in the tier."""

    def drain(self, timeout_s: float) -> Sequence[int]:
        """The jobs that may still touch their buffers after *timeout_s*."""

    def reset(self, namespace: str, description: Mapping[str, Any]) -> None:
        """Serve *namespace* from now on."""

    def shutdown(self, timeout_s: float) -> bool:
        """Shut the tier down. Whether it is down."""


class _NotingGuard(Guard):
    """Notes where the tier raised, for the message of the test that fails for it."""

    def __init__(self, identity: TierIdentity, tier_class: type[Any]) -> None:
        super().__init__(identity, (), logging.getLogger("kvtier"))
        self._tier_class = tier_class

    def debug(self, hook: str, error: BaseException) -> None:
        note_raised(error, self._tier_class)
        super().debug(hook, error)


class _PortBackend:
    """A ``BlockTier`` behind ``BlockingTier``, with clocks of the test's own."""

    def __init__(
        self,
        tier_class: type[BlockTier],
        settings: TierSettings,
        context: TierContext,
        policies: Mapping[str, PolicyFactory],
        surroundings: Surroundings,
    ) -> None:
        self._patience_s = surroundings.patience_s
        self._results: SimpleQueue[JobResult] = SimpleQueue()
        self._changed = threading.Condition()
        self._touching: set[int] = set()
        """Loads and stores that have no result."""
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._woken = surroundings.woken
        self._generation = 0
        identity = TierIdentity(
            name=context.name, type=context.name, distribution=tier_class.__module__, version="0"
        )
        home = TierHome(
            guard=_NotingGuard(identity, tier_class),
            info=tier_class.info,
            limits=settings.limits,
            context=replace(context, policies=policies),
            row=surroundings.rows.row,
            clock=surroundings.monotonic,
            wall=surroundings.wall,
            emit=self._events.put,
            finish=self._finish,
        )
        self.port = BlockingTier(tier_class, settings, home)
        self.port.start(None)
        self._wait_serving()

    def _finish(self, result: JobResult) -> None:
        with self._changed:
            self._touching.discard(result.job_id)
            self._changed.notify_all()
        self._results.put(result)
        self._woken()

    @property
    def hangs(self) -> bool:
        return False  # its calls are made by threads of the port

    def _wait_serving(self) -> None:
        event: Event | None = None
        while not isinstance(event, Serving | OpenFailed):
            try:
                event = self._events.get(timeout=self._patience_s)
            except Empty:
                raise HangError("the tier's constructor, open or scan", self._patience_s) from None
        if isinstance(event, OpenFailed):
            error = TierOpenError(event.error)
            error.is_explained = event.is_explained
            raise error

    def submit(self, kind: JobKind, job: TierJob) -> None:
        self.port.tick()
        if kind is not JobKind.LOOKUP:
            with self._changed:
                self._touching.add(job.id)
        self.port.submit(kind, replace(job, buffers=()))

    def collect(self) -> Sequence[JobResult]:
        self.port.tick()
        results: list[JobResult] = []
        while True:
            try:
                results.append(self._results.get_nowait())
            except Empty:
                return results

    def cancel(self, job_ids: Sequence[int]) -> None:
        self.port.cancel(job_ids)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self.port.discard(keys)

    def touch(self, keys: Sequence[OffloadKey], chain: int) -> None:
        self.port.touch(keys, chain)
        passed_on = threading.Event()
        self.port._calls.put(passed_on.set)  # noqa: SLF001 - the port's thread takes its calls in order
        passed_on.wait(self._patience_s)

    def resident(self) -> PresenceSet | None:
        return self.port.resident()

    def has(self, hook: str) -> bool:
        return True

    def take_events(self) -> Sequence[TierEvent]:
        return self.port.take_events()

    def drain(self, timeout_s: float) -> Sequence[int]:
        with self._changed:
            self._changed.wait_for(lambda: not self._touching, timeout_s)
            return sorted(self._touching)

    def reset(self, namespace: str, description: Mapping[str, Any]) -> None:
        self._generation += 1
        self.port.reset(namespace, description, self._generation)
        self._wait_serving()

    def shutdown(self, timeout_s: float) -> bool:
        self.port.shutdown(timeout_s)
        return self.port.wait_down(timeout_s + self._patience_s)


class _HookBackend:
    """A plugin on the hook specs, whose hooks are called on one thread, as in the core, and nothing is caught."""

    def __init__(
        self,
        tier_class: type[Any],
        settings: TierSettings,
        context: TierContext,
        surroundings: Surroundings,
    ) -> None:
        self._tier_class = tier_class
        self._thread = CallThread(surroundings.patience_s)
        self._reports = tier_class.info.reports_contents
        self._reported = ReportedContents(settings.limits.max_resident_keys)
        self._jobs: dict[int, tuple[JobKind, TierJob]] = {}
        context = replace(
            context,
            wake=surroundings.woken,
            report_stored=self._reported.stored,
            report_evicted=self._reported.evicted,
        )
        plugin = self._thread.call("the constructor", lambda: tier_class(settings, context))
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(TierHookSpecs)
        manager.register(plugin)
        manager.check_pending()
        self._hooks: Any = manager.hook
        self._answers: list[JobResult] = []
        self._call("on_open", pool=surroundings.rows.view)

    @property
    def hangs(self) -> bool:
        return self._thread.hangs

    def _call(self, hook: str, **arguments: object) -> Any:  # noqa: ANN401 - a tier's answer
        timeout_s = arguments.get("timeout_s", 0.0)
        assert isinstance(timeout_s, float | int), f"not a number of seconds: {timeout_s!r}"
        try:
            return self._thread.call(hook, partial(getattr(self._hooks, hook), **arguments), timeout_s)
        except Exception as error:
            note_raised(error, self._tier_class)
            raise

    def submit(self, kind: JobKind, job: TierJob) -> None:
        self._jobs[job.id] = kind, job
        self._reported.begin(kind, job)
        if kind is JobKind.LOOKUP:
            present = self._call("lookup", job=job)
            if present is not None:
                self._answers.append(JobResult(job_id=job.id, present=present))
        elif kind is JobKind.TIER_LOAD:
            self._call("submit_load", job=job)
        else:
            self._call("submit_store", job=job)

    def collect(self) -> Sequence[JobResult]:
        answers, self._answers = self._answers, []
        results = [*answers, *(self._call("get_finished_jobs") or ())]
        for result in results:
            if isinstance(result, JobResult) and result.job_id in self._jobs:
                self._reported.end(*self._jobs.pop(result.job_id), result)
        return results

    def cancel(self, job_ids: Sequence[int]) -> None:
        self._call("cancel_jobs", job_ids=tuple(job_ids))

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._reported.evicted(keys)
        self._call("discard", keys=tuple(keys))

    def resident(self) -> PresenceSet | None:
        return self._reported.keys if self._reports else None

    def touch(self, keys: Sequence[OffloadKey], chain: int) -> None:
        self._call("touch", keys=keys)

    def take_events(self) -> Sequence[TierEvent]:
        return self._reported.keys.take_events()

    def drain(self, timeout_s: float) -> Sequence[int]:
        return list(self._call("drain_jobs", timeout_s=timeout_s) or ())

    def reset(self, namespace: str, description: Mapping[str, Any]) -> None:
        self._reported.clear()
        self._call("reset", namespace=namespace, description=description)

    def shutdown(self, timeout_s: float) -> bool:
        self._call("shutdown", timeout_s=timeout_s)
        return True

    def has(self, hook: str) -> bool:
        return bool(getattr(self._hooks, hook).get_hookimpls())


def open_backend(
    tier_class: type[Any],
    settings: TierSettings,
    context: TierContext,
    policies: Mapping[str, PolicyFactory],
    surroundings: Surroundings,
) -> Backend:
    """Build and open a tier."""
    if issubclass(tier_class, BlockTier):
        return _PortBackend(tier_class, settings, context, policies, surroundings)
    return _HookBackend(tier_class, settings, context, surroundings)
