"""A tier host runs one tier instance: its hook thread, on which its hooks are called one at a time, in order (C31).

The engine's thread only puts calls into the inbox; results come back as events. A hook that hangs holds up this tier
alone. A job whose deadline has passed before its turn is not started. While jobs are under way the thread polls
``get_finished_jobs``, at once when the tier calls its context's ``wake``; when only overdue jobs are left it looks
once a second, so that an idle engine stays idle.
"""

import logging
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pluggy

from kvtier_core.coordinator import Finished, JobKind
from kvtier_core.hookspecs import PROJECT, TierHookSpecs
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.answers import job_id_of, plain_events, plain_result, read_results
from kvtier_core.manager.blocking import BlockTierAdapter
from kvtier_core.manager.events import Changed, Event, Fault, OpenFailed, Serving, WholeRequest
from kvtier_core.manager.guard import Guard, HookFault, TierIdentity, text_of
from kvtier_core.manager.inbox import MAX_WAITING, Inbox
from kvtier_core.manager.integrity import Integrity, LoadCheck
from kvtier_core.manager.opening import Opening
from kvtier_core.proof import Sealer
from kvtier_core.tier_settings import TierLimits
from kvtier_core.transfer.pool import Pool
from kvtier_core.values import JobResult, OffloadPolicy, PoolView, RequestInfo, TierJob

_HOOKS = {JobKind.LOOKUP: "lookup", JobKind.TIER_LOAD: "submit_load", JobKind.TIER_STORE: "submit_store"}
_NUMBERED = re.compile(r"\w*\d\w*")
_FIRST_POLL_S = 0.001
_LAST_POLL_S = 0.05
_OVERDUE_POLL_S = 1.0
_MAX_NONSENSE = 1000
"""Results beyond one for each job under way that a call may hand out; what comes after them is not looked at."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A job that the tier has accepted and not answered; *load* is there for loads."""

    hook: str
    job: TierJob
    load: LoadCheck | None
    generation: int
    """The number of the namespace that was wanted then."""


class TierHost:
    """One tier instance and its hook thread. The public methods may be called from any thread and return at once."""

    def __init__(
        self,
        identity: TierIdentity,
        *,
        secrets: Collection[str],
        limits: TierLimits,
        pool: Pool,
        clock: Callable[[], float],
        emit: Callable[[Event], None],
        integrity: Integrity,
        log: logging.Logger,
    ) -> None:
        self.identity = identity
        self._pool = pool
        self._clock = clock
        self._emit = emit
        self._integrity = integrity
        self._log = log
        self._guard = Guard(identity, secrets, log)
        self._open_retry_s = limits.open_retry
        self._inbox = Inbox(MAX_WAITING)
        self._running: dict[int, _Running] = {}
        self._overdue: dict[int, _Running] = {}
        """Jobs under way whose deadline has passed: perhaps very many, so nothing here walks them."""
        self._refused: dict[str, list[OffloadKey]] = {}
        """Of each request that the tier gets as a whole: keys whose store came too late to reach it."""
        self._unheard: dict[str, RequestInfo] = {}
        """Requests that began before the tier was open."""
        self._plugin: Any = None
        self._adapter: BlockTierAdapter | None = None
        """The plugin where it is the core's own: only that keeps a resident set, and can be told of wrong bytes."""
        self._hooks: Any = None
        self._opening: Opening
        self._stopping = False
        self._pause = _FIRST_POLL_S
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{identity.name}", daemon=True)
        self._ended = threading.Event()
        self._is_down = False

    # -- from the engine's thread

    @property
    def is_started(self) -> bool:
        """Whether the tier was given a plugin and a thread."""
        return self._plugin is not None

    def start(self, plugin: object, pool: PoolView | None) -> None:
        """Register *plugin*'s hook implementations and open it on the hook thread."""
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(TierHookSpecs)
        manager.register(plugin, name=self.identity.name)
        manager.check_pending()
        self._plugin = plugin
        self._adapter = plugin if isinstance(plugin, BlockTierAdapter) else None
        self._hooks = manager.hook
        self._opening = Opening(self._hooks, pool, self._guard, retry_s=self._open_retry_s, clock=self._clock)
        self._inbox.put(self._get_ready)
        self._thread.start()

    def wake(self) -> None:
        """A result may be ready: look now."""
        self._inbox.wake()

    def submit(self, kind: JobKind, job: TierJob, sealer: Sealer) -> None:
        """Hand a job to the tier; the rows of a load are checked with *sealer* before the result is reported."""
        load = LoadCheck(self.identity.name, job, sealer) if kind is JobKind.TIER_LOAD else None
        hook = _HOOKS[kind]
        if not self._inbox.put_job(job.request, partial(self._submit, hook, job, load)):
            self._report(_not_begun(hook, job, "the tier is too far behind to hear of this request"))

    def begin_request(self, request: RequestInfo) -> None:
        """Tell the tier that a request began, before any job of it."""
        self._inbox.begin_request(request, partial(self._begin, request))

    def end_request(self, request: RequestInfo, not_stored: Sequence[OffloadKey]) -> None:
        """Tell the tier that a request is over, after every job of it."""
        self._inbox.end_request(request, partial(self._end, request, not_stored))

    def tell(self, hook: str, **arguments: object) -> None:
        """Call a hook whose answer nobody waits for, unless the tier is far behind."""
        self._inbox.put_news(partial(self._tell, hook, arguments))

    def touch(self, keys: Sequence[OffloadKey], chain: int) -> None:
        """These keys were used from the pool by a request with the number *chain*, its beginning first."""
        self._inbox.put_news(partial(self._touch, keys, chain))

    def ask_changes(self) -> bool:
        """Ask what changed in the tier's contents, reported as ``Changed``; False for a tier that does not say."""
        if not self.is_started or not self._hooks.take_events.get_hookimpls():
            return False
        self._inbox.put(self._take_events)
        return True

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """These keys gave wrong bytes: let the tier forget them, where it can."""
        self._inbox.put_news(partial(self._discard, keys))

    def reset(self, namespace: str, description: Mapping[str, Any], generation: int) -> None:
        """Let the tier serve *namespace* from now on; reported as ``Serving`` once it does."""
        self._inbox.put(partial(self._reset, namespace, description, generation))

    def shutdown(self, timeout_s: float) -> None:
        """Shut the tier down and end the hook thread."""
        self._inbox.put(partial(self._shutdown, timeout_s))

    def wait_down(self, timeout_s: float) -> bool:
        """Wait for the end of ``shutdown``; whether the tier has confirmed that it no longer touches the pool."""
        return self._ended.wait(timeout_s) and self._is_down

    # -- the hook thread

    def _run(self) -> None:
        while not self._stopping:
            call = self._inbox.get(self._poll_timeout())
            if call is not None:
                self._pause = _FIRST_POLL_S
                self._guarded(call)
            if (self._running or self._overdue) and not self._stopping:
                self._guarded(self._collect)
            due = self._opening.due
            if due is not None and due <= self._clock() and not self._stopping:
                self._guarded(self._get_ready)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run a turn of this thread; an answer so odd that it trips us must not end the thread."""
        if isinstance(self._guard.call("hook thread", work), HookFault):
            self._fault()

    def _poll_timeout(self) -> float | None:
        now = self._clock()
        until_retry = None if self._opening.due is None else max(0.0, self._opening.due - now)
        if not self._running and not self._overdue:
            return until_retry
        for job_id in [i for i, running in self._running.items() if running.job.deadline <= now]:
            self._overdue[job_id] = self._running.pop(job_id)
        if not self._running:
            return _OVERDUE_POLL_S if until_retry is None else min(until_retry, _OVERDUE_POLL_S)
        pause = self._pause
        self._pause = min(pause * 2, _LAST_POLL_S)
        return pause

    def _call(self, hook: str, **arguments: object) -> Any:  # noqa: ANN401 - a plugin's answer
        return self._guard.call(hook, getattr(self._hooks, hook), **arguments)

    def _fault(self) -> None:
        self._emit(Fault(self.identity.name))

    def _get_ready(self) -> None:
        """Open the tier and take it to the namespace that is wanted, as far as that is still to be done."""
        was_open, is_late = self._opening.is_open, self._opening.due is not None
        error = self._opening.attempt()
        if self._opening.is_open and not was_open:
            while self._unheard:
                self._begin(self._unheard.pop(next(iter(self._unheard))))
        if error is None:
            if is_late:
                self._log.warning("%s is open now: it serves from here on", self.identity)
            resident = self._adapter.resident_presence if self._adapter is not None else None
            self._emit(Serving(self.identity.name, self._opening.generation, resident))
        elif is_late:
            pass  # an engine that does nothing takes no events in: later tries tell it nothing new
        elif self._opening.is_open:
            self._fault()
        else:
            self._emit(
                OpenFailed(
                    self.identity.name,
                    error,
                    is_explained=self._opening.is_explained,
                    will_retry=self._opening.due is not None,
                )
            )

    def _submit(self, hook: str, job: TierJob, load: LoadCheck | None) -> None:
        if job.deadline <= self._clock():
            if hook == "submit_store" and job.request.request_id in self._refused:
                self._refused[job.request.request_id].extend(job.keys)
            self._report(_not_begun(hook, job, "its deadline passed before the tier's turn came"))
            return
        if load is not None:
            self._integrity.begin(load)
        rows = (self._pool.row(row) for row in job.rows)
        buffers = tuple(row.toreadonly() if hook == "submit_store" else row for row in rows)
        job = replace(
            job,
            buffers=buffers,
            arrived=None if load is None else partial(self._integrity.verify_early, load),
        )
        self._running[job.id] = _Running(hook, job, load, self._opening.generation)
        answer = self._call(hook, job=job)
        if isinstance(answer, HookFault):
            self._end_job(self._running.pop(job.id), JobResult(job_id=job.id, error=answer.text))
        elif hook == "lookup" and answer is not None:
            self._take(JobResult(job_id=job.id, present=answer))

    def _collect(self) -> None:
        results: list[object] = []
        limit = len(self._running) + len(self._overdue) + _MAX_NONSENSE
        answer = self._guard.call(
            "get_finished_jobs", lambda: read_results(self._hooks.get_finished_jobs(), results, limit)
        )
        if results:
            self._pause = _FIRST_POLL_S
        # Each by itself, so that one that trips us costs no other job its result.
        taken = [self._guard.call("get_finished_jobs", self._take, result=result) for result in results]
        if isinstance(answer, HookFault) or taken.count(True) < len(taken):
            self._fault()  # one for a call, however much nonsense it gave: the engine takes in each

    def _take(self, result: object) -> bool:
        """Pass on one result. One for a job that is not running is never passed on: its rows may be another's."""
        job_id = job_id_of(result)
        running = self._take_running(job_id) if job_id is not None else None
        if running is None or not isinstance(result, JobResult):
            text = f"{text_of(result)} fits no job that this tier has under way"
            self._guard.report("get_finished_jobs", "foreign", text)
            return False
        plain = self._guard.call(running.hook, plain_result, result=result, job_id=running.job.id)
        if isinstance(plain, HookFault):
            self._emit(Fault(self.identity.name, of_job=True))
            plain = JobResult(job_id=running.job.id, error="the tier's result was malformed")
        elif plain.error is not None and running.generation == self._opening.generation:  # no reset ended it
            # Counts and names of blocks differ each time; what went wrong is the same.
            kind = _NUMBERED.sub("#", plain.error)
            self._guard.report(running.hook, kind, f"a {running.hook} job failed: {plain.error}")
        self._end_job(running, plain)
        return True

    def _end_job(self, running: _Running, result: JobResult) -> None:
        """Report a result of a job that the tier had, in plain values."""
        if running.load is not None:
            self._integrity.verify(running.load, result)
        else:
            self._report(result)

    def _take_running(self, job_id: int) -> _Running | None:
        return self._running.pop(job_id, None) or self._overdue.pop(job_id, None)

    def _report(self, result: JobResult) -> None:
        self._emit(Finished(self.identity.name, result))

    def _begin(self, request: RequestInfo) -> None:
        if not self._opening.is_open:
            self._unheard[request.request_id] = request
            return
        answer = self._call("on_new_request", request=request)
        if isinstance(answer, HookFault):
            self._fault()
        elif answer is OffloadPolicy.REQUEST_LEVEL:
            self._emit(WholeRequest(self.identity.name, request))
        elif answer is not None and answer is not OffloadPolicy.BLOCK_LEVEL:
            text = f"on_new_request must return an OffloadPolicy or None, not {text_of(answer)}"
            self._guard.report("on_new_request", "nonsense", text)
            self._fault()
        if answer is OffloadPolicy.REQUEST_LEVEL or request.wants_remote_decode:
            self._refused[request.request_id] = []

    def _end(self, request: RequestInfo, not_stored: Sequence[OffloadKey]) -> None:
        """Tell the tier that a request is over, and which of its blocks never reached the tier."""
        if self._unheard.pop(request.request_id, None) is not None:
            return
        refused = self._refused.pop(request.request_id, ())
        if not_stored or refused:
            request = replace(request, not_stored=(*not_stored, *refused))
        self._tell("on_request_finished", {"request": request})

    def _tell(self, hook: str, arguments: Mapping[str, Any]) -> None:
        if self._opening.is_open and isinstance(self._call(hook, **arguments), HookFault):
            self._fault()

    def _touch(self, keys: Sequence[OffloadKey], chain: int) -> None:
        if self._adapter is None:
            self._tell("touch", {"keys": keys})
        elif isinstance(self._guard.call("touch", self._adapter.use, keys=keys, chain=chain), HookFault):
            self._fault()

    def _take_events(self) -> None:
        if not self._opening.is_open:
            self._emit(Changed(self.identity.name, ()))
            return
        events = self._guard.call("take_events", lambda: plain_events(self._hooks.take_events()))
        if isinstance(events, HookFault):
            self._fault()
            events = ()
        self._emit(Changed(self.identity.name, events))

    def _discard(self, keys: Sequence[OffloadKey]) -> None:
        if self._adapter is not None:
            self._adapter.discard(keys)

    def _reset(self, namespace: str, description: Mapping[str, Any], generation: int) -> None:
        self._opening.want(namespace, description, generation)
        self._get_ready()

    def _shutdown(self, timeout_s: float) -> None:
        self._stopping = True
        answer = self._call("shutdown", timeout_s=timeout_s)
        if isinstance(answer, HookFault):
            self._fault()
        else:
            self._is_down = not self._may_touch_pool(timeout_s)
        self._ended.set()

    def _may_touch_pool(self, timeout_s: float) -> bool:
        """Whether jobs are left that may still touch the pool, as far as the tier can tell."""
        if not self._hooks.drain_jobs.get_hookimpls():
            return False
        left = self._call("drain_jobs", timeout_s=timeout_s)
        return isinstance(left, HookFault) or bool(left)


def _not_begun(hook: str, job: TierJob, error: str) -> JobResult:
    """The result of a job that the tier never heard of. A lookup tells nothing then, and is no fault."""
    if hook == "lookup":
        return JobResult(job_id=job.id, present=(None,) * len(job.keys))
    return JobResult(job_id=job.id, error=error)
