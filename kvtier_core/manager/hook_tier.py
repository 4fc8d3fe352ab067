"""``HookTier``: the port of a plugin on the hook specs, whose hooks run one at a time, in order, on a thread (C31).

A hook that hangs holds up this tier alone. A job whose deadline has passed before its turn is not started. While jobs
are under way the thread polls ``get_finished_jobs``, at once when the tier calls its context's ``wake``. When only
overdue jobs are left it looks once a second, so that an idle engine stays idle.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pluggy

from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.hookspecs import PROJECT, TierHookSpecs
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.answers import job_id_of, plain_result, read_results
from kvtier_core.manager.events import TierFault, WholeRequest
from kvtier_core.manager.guard import HookFault, text_of
from kvtier_core.manager.inbox import MAX_WAITING, Inbox
from kvtier_core.manager.port import TierHome, TierPort
from kvtier_core.manager.presence import PresenceSet, ReportedContents
from kvtier_core.values import (
    JobResult,
    OffloadPolicy,
    RequestInfo,
    TierContext,
    TierEvent,
    TierJob,
)

_HOOKS = {JobKind.LOOKUP: "lookup", JobKind.TIER_LOAD: "submit_load", JobKind.TIER_STORE: "submit_store"}
_FIRST_POLL_S = 0.001
_LAST_POLL_S = 0.05
_OVERDUE_POLL_S = 1.0
_MAX_NONSENSE = 1000
"""Results beyond one for each job under way that a call may hand out; what comes after them is not looked at."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A job that the tier has accepted and not answered."""

    kind: JobKind
    job: TierJob
    generation: int
    """The number of the namespace that was wanted then."""

    @property
    def hook(self) -> str:
        return _HOOKS[self.kind]


class HookTier(TierPort):
    """One plugin and its hook thread. See ``TierPort`` for the public methods."""

    listens = True

    def __init__(self, make_plugin: Callable[[TierContext], object], home: TierHome) -> None:
        self._inbox = Inbox(MAX_WAITING)
        super().__init__(home, self._inbox)
        self._make_plugin = make_plugin
        self._reported = ReportedContents(home.limits.max_resident_keys)
        self._running: dict[int, _Running] = {}
        self._refused: dict[str, list[OffloadKey]] = {}
        """Of each request that the tier gets as a whole: keys whose store came too late to reach it."""
        self._unheard: dict[str, RequestInfo] = {}
        """Requests that began before the tier was open."""
        self._hooks: Any = None
        self._poll_s = _FIRST_POLL_S

    # -- for any thread

    def submit(self, kind: JobKind, job: TierJob) -> None:
        """As ``TierPort.submit``."""
        if not self._inbox.put_job(job.request, partial(self._submit, kind, job)):
            self._home.finish(_not_begun(kind, job, "the tier is too far behind to hear of this request"))

    def begin_request(self, request: RequestInfo) -> None:
        """As ``TierPort.begin_request``."""
        self._inbox.begin_request(request, partial(self._begin, request))

    def end_request(self, request: RequestInfo, not_stored: Sequence[OffloadKey]) -> None:
        """As ``TierPort.end_request``."""
        self._inbox.end_request(request, partial(self._end_request, request, not_stored))

    def end_step(self, step: int) -> None:
        """As ``TierPort.end_step``."""
        self._put_news("on_schedule_end", step=step)

    def cancel(self, job_ids: Sequence[int]) -> None:
        """As ``TierPort.cancel``."""
        self._put_news("cancel_jobs", job_ids=job_ids)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """As ``TierPort.discard``."""
        self._reported.evicted(keys)
        if self._has("discard"):
            self._put_news("discard", keys=keys)

    def touch(self, keys: Sequence[OffloadKey], chain: int) -> None:  # noqa: ARG002 - the hook has the keys alone
        """As ``TierPort.touch``."""
        self._put_news("touch", keys=keys)

    def _put_news(self, hook: str, **arguments: object) -> None:
        """Call a hook whose answer nobody waits for, unless the tier is far behind."""
        self._inbox.put_news(partial(self._tell, hook, arguments))

    def take_events(self) -> list[TierEvent]:
        """As ``TierPort.take_events``: what the tier has reported."""
        return self._reported.keys.take_events() if self._home.info.reports_contents else []

    def _has(self, hook: str) -> bool:
        return bool(getattr(self._hooks, hook).get_hookimpls())

    # -- the hook thread

    def _turn(self) -> None:
        if self._running:
            self._collect()

    def _pause(self) -> float | None:
        now = self._home.clock()
        until_retry = None if self._retry_at is None else max(0.0, self._retry_at - now)
        if not self._running:
            return until_retry
        newest_first = reversed(self._running.values())  # overdue ones may be very many, and are the oldest
        if all(running.job.deadline <= now for running in newest_first):
            return _OVERDUE_POLL_S if until_retry is None else min(until_retry, _OVERDUE_POLL_S)
        pause = self._poll_s
        self._poll_s = min(pause * 2, _LAST_POLL_S)
        return pause

    def _call(self, hook: str, **arguments: object) -> Any:  # noqa: ANN401 - a plugin's answer
        return self._guard.call(hook, getattr(self._hooks, hook), **arguments)

    def _build(self) -> None:
        context = replace(self._home.context, wake=self._inbox.wake)
        if self._home.info.reports_contents:
            context = replace(
                context, report_stored=self._reported.stored, report_evicted=self._reported.evicted
            )
        plugin = self._make_plugin(context)
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(TierHookSpecs)
        manager.register(plugin, name=self.identity.name)
        manager.check_pending()
        self._hooks = manager.hook
        self._can_go_over = self._has("reset")

    def _open(self) -> None:
        if self._hooks is None:
            self._build()
        self._reported.clear()
        self._hooks.on_open(pool=self._pool)

    def resident(self) -> PresenceSet | None:
        """As ``TierPort.resident``: what the tier has reported."""
        return self._reported.keys if self._home.info.reports_contents else None

    def _attempt(self) -> tuple[str, bool] | None:
        failed = super()._attempt()
        while self._is_open and self._unheard:
            self._begin(self._unheard.pop(next(iter(self._unheard))))
        return failed

    def _submit(self, kind: JobKind, job: TierJob) -> None:
        if job.deadline <= self._home.clock():
            if kind is JobKind.TIER_STORE and job.request.request_id in self._refused:
                self._refused[job.request.request_id].extend(job.keys)
            self._home.finish(_not_begun(kind, job, "its deadline passed before the tier's turn came"))
            return
        view = self._home.row_to_store if kind is JobKind.TIER_STORE else self._home.row_to_load
        job = replace(job, buffers=tuple(map(view, job.rows)))
        self._running[job.id] = _Running(kind, job, self._generation)
        self._reported.begin(kind, job)
        answer = self._call(_HOOKS[kind], job=job)
        if isinstance(answer, HookFault):
            del self._running[job.id]
            self._end(kind, job, JobResult(job_id=job.id, error=answer.text))
        elif kind is JobKind.LOOKUP and answer is not None:
            self._take(JobResult(job_id=job.id, present=answer))

    def _collect(self) -> None:
        results: list[object] = []
        limit = len(self._running) + _MAX_NONSENSE
        answer = self._guard.call(
            "get_finished_jobs", lambda: read_results(self._hooks.get_finished_jobs(), results, limit)
        )
        if results:
            self._poll_s = _FIRST_POLL_S
        # Each by itself, so that one that trips us costs no other job its result.
        taken = [self._guard.call("get_finished_jobs", self._take, result=result) for result in results]
        if isinstance(answer, HookFault) or taken.count(True) < len(taken):
            self._fault()  # one for a call, however much nonsense it gave: the engine takes in each

    def _take(self, result: object) -> bool:
        """Pass on one result. One for a job that is not running is never passed on: its rows may be another's."""
        job_id = job_id_of(result)
        running = self._running.pop(job_id, None) if job_id is not None else None
        if running is None or not isinstance(result, JobResult):
            what = text_of(result) if job_id is None else f"a result of job {job_id}"
            text = f"get_finished_jobs handed out {what}, which fits no job that this tier has under way"
            self._guard.report("get_finished_jobs", f"{text}: each has one result", kind="foreign")
            return False
        plain = self._guard.call(f"a result of {running.hook}", plain_result, result=result, job=running.job)
        if isinstance(plain, HookFault):
            self._home.emit(TierFault(self.identity.name, of_job=True))
            plain = JobResult(job_id=running.job.id, error="the tier's result was malformed")
        elif (plain.error is not None or plain.failed) and running.generation == self._generation:
            # What a reset ended is no failure.
            failed, keys = len(plain.failed), len(running.job.keys)
            why = plain.error or f"{failed} of {keys} blocks, without a reason (JobResult.error)"
            self._guard.report(running.hook, f"a {running.hook} job failed: {why}")
        self._end(running.kind, running.job, plain)
        return True

    def _end(self, kind: JobKind, job: TierJob, result: JobResult) -> None:
        self._reported.end(kind, job, result)
        self._home.finish(result)

    def _begin(self, request: RequestInfo) -> None:
        if not self._is_open:
            self._unheard[request.request_id] = request
            return
        answer = self._call("on_new_request", request=request)
        if isinstance(answer, HookFault):
            self._fault()
        elif answer is OffloadPolicy.REQUEST_LEVEL:
            self._home.emit(WholeRequest(self.identity.name, request))
        elif answer is not None and answer is not OffloadPolicy.BLOCK_LEVEL:
            text = f"on_new_request must return an OffloadPolicy or None, not {text_of(answer)}"
            self._guard.report("on_new_request", text, kind="nonsense")
            self._fault()
        if answer is OffloadPolicy.REQUEST_LEVEL or request.wants_remote_decode:
            self._refused[request.request_id] = []

    def _end_request(self, request: RequestInfo, not_stored: Sequence[OffloadKey]) -> None:
        """Tell the tier that a request is over, and which of its blocks never reached the tier."""
        if self._unheard.pop(request.request_id, None) is not None:
            return
        refused = self._refused.pop(request.request_id, ())
        if not_stored or refused:
            request = replace(request, not_stored=(*not_stored, *refused))
        self._tell("on_request_finished", {"request": request})

    def _tell(self, hook: str, arguments: Mapping[str, Any]) -> None:
        if self._is_open and isinstance(self._call(hook, **arguments), HookFault):
            self._fault()

    def _go_over(self, namespace: str, description: Mapping[str, Any]) -> None:
        self._reported.clear()
        self._hooks.reset(namespace=namespace, description=description)

    def _close(self, timeout_s: float) -> bool:
        if self._hooks is None:  # it could not even be built
            return True
        if isinstance(self._call("shutdown", timeout_s=timeout_s), HookFault):
            self._fault()
            return False
        if self._may_touch_pool(timeout_s):
            return False
        self._running.clear()  # or our own views of its jobs' rows would keep the pool mapped
        return True

    def _may_touch_pool(self, timeout_s: float) -> bool:
        """Whether jobs are left that may still touch the pool, as far as the tier can tell."""
        if self._has("drain_jobs"):
            left = self._call("drain_jobs", timeout_s=timeout_s)
            return isinstance(left, HookFault) or bool(left)
        return not self._has("shutdown") and self._has_rows_after(timeout_s)

    def _has_rows_after(self, timeout_s: float) -> bool:
        """Whether loads or stores are left without a result after *timeout_s*: a tier without hooks can't say more."""
        give_up = self._home.clock() + timeout_s
        while any(running.job.rows for running in self._running.values()):
            left = give_up - self._home.clock()
            if left <= 0:
                self._guard.tell(
                    "has no shutdown hook and still has loads or stores without a result: the pool stays mapped"
                )
                return True
            self._calls.get(min(left, self._pause() or _LAST_POLL_S))
            self._collect()
        return False


def _not_begun(kind: JobKind, job: TierJob, error: str) -> JobResult:
    """The result of a job that the tier never heard of. A lookup tells nothing then, and is no fault."""
    if kind is JobKind.LOOKUP:
        return JobResult(job_id=job.id, present=(None,) * len(job.keys))
    return JobResult(job_id=job.id, error=error)
