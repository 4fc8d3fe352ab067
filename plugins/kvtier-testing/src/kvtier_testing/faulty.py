"""A tier on the raw hook specs that can be told to fail, to hang, to lie or to wait: for tests of what stands above.

It keeps real bytes in a dict and answers at once unless told otherwise. It decides nothing by itself: every
misbehaviour is switched on by the test.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvtier_core.hookspecs import hookimpl
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import JobResult, OffloadPolicy, PoolView, RequestInfo, TierContext, TierInfo, TierJob

if TYPE_CHECKING:
    from kvtier_core.keys import OffloadKey


class FaultyTier:
    """Implements every hook the core calls.

    Switches, all for any thread: ``raise_in`` maps a hook's name to the exception it raises; ``hang_in`` maps a hook's
    name to an event it waits for; ``hold`` names the kinds of jobs (``"lookup"``, ``"store"``, ``"load"``) whose
    results are kept back until ``release``; ``extra_results`` are handed out once beside the true ones. ``calls`` lists
    the hooks called, with the request's id or ``""``.
    """

    Settings: ClassVar[type[TierSettings]] = TierSettings
    info = TierInfo(medium="memory", bounded_by="storage")

    def __init__(self, settings: TierSettings, context: TierContext) -> None:
        self.settings = settings
        self.context = context
        self.namespace = context.namespace
        self.blocks: dict[str, dict[OffloadKey, bytes]] = {context.namespace: {}}
        self.raise_in: dict[str, BaseException] = {}
        self.hang_in: dict[str, threading.Event] = {}
        self.hold: set[str] = set()
        self.held: list[tuple[str, TierJob, str]] = []
        self.extra_results: list[Any] = []
        self.corrupt = False
        """Loads hand out the stored bytes with one bit flipped."""
        self.policy: Any = None
        """What ``on_new_request`` returns."""
        self.not_stored: dict[str, tuple[OffloadKey, ...]] = {}
        """Of each finished request, the keys that it was told it did not get."""
        self.discarded: list[OffloadKey] = []
        """The keys that it was told to forget."""
        self.calls: list[tuple[str, str]] = []
        self.called = threading.Condition()
        self._results: list[JobResult] = []

    def wait_for_call(self, hook: str, timeout_s: float = 10.0, *, times: int = 1) -> bool:
        """Wait until *hook* has been called so many *times*. Whether it was in time."""
        with self.called:
            return self.called.wait_for(
                lambda: sum(name == hook for name, _ in self.calls) >= times, timeout_s
            )

    def _enter(self, hook: str, request: RequestInfo | None = None) -> None:
        with self.called:
            self.calls.append((hook, request.request_id if request is not None else ""))
            self.called.notify_all()
        if hook in self.hang_in:
            self.hang_in[hook].wait()
        if hook in self.raise_in:
            raise self.raise_in[hook]

    def release(self, *, also_write: bytes = b"") -> None:
        """Carry out the held jobs now and hand out their results; *also_write* goes to the start of loads' rows."""
        for kind, job, namespace in self.held:
            self._results.append(self._carry_out(kind, job, namespace))
            for buffer in job.buffers if kind == "load" else ():
                buffer[: len(also_write)] = also_write
        self.held.clear()
        self.context.wake()

    def _submit(self, kind: str, job: TierJob) -> None:
        if kind in self.hold:
            self.held.append((kind, job, self.namespace))
        else:
            self._results.append(self._carry_out(kind, job, self.namespace))
            self.context.wake()

    def _carry_out(self, kind: str, job: TierJob, namespace: str) -> JobResult:
        blocks = self.blocks[namespace]
        if kind == "lookup":
            return JobResult(job_id=job.id, present=[key in blocks for key in job.keys])
        missing = []
        for key, buffer in zip(job.keys, job.buffers, strict=True):
            if kind == "store":
                blocks[key] = bytes(buffer)
            elif key not in blocks:
                missing.append(key)
            else:
                buffer[:] = blocks[key]
                if self.corrupt:
                    buffer[0] ^= 1
        return JobResult(job_id=job.id, missing=missing)

    @hookimpl
    def on_open(self, pool: PoolView | None) -> None:
        """Nothing to open."""
        self._enter("on_open")

    @hookimpl
    def lookup(self, job: TierJob) -> Sequence[bool] | None:
        """Answered through a result, like a tier that does I/O."""
        self._enter("lookup", job.request)
        self._submit("lookup", job)
        return None

    @hookimpl
    def submit_store(self, job: TierJob) -> None:
        """Copies the rows into the dict."""
        self._enter("submit_store", job.request)
        self._submit("store", job)

    @hookimpl
    def submit_load(self, job: TierJob) -> None:
        """Copies from the dict into the rows."""
        self._enter("submit_load", job.request)
        self._submit("load", job)

    @hookimpl
    def get_finished_jobs(self) -> Sequence[JobResult]:
        """The results that are not held back."""
        self._enter("get_finished_jobs")
        results, self._results = self._results, []
        extra, self.extra_results = self.extra_results, []
        return [*results, *extra]

    @hookimpl
    def discard(self, keys: Sequence["OffloadKey"]) -> None:
        """Forgets the blocks."""
        self._enter("discard")
        self.discarded += keys
        for key in keys:
            self.blocks[self.namespace].pop(key, None)

    @hookimpl
    def on_new_request(self, request: RequestInfo) -> OffloadPolicy | None:
        """Answers with ``policy``."""
        self._enter("on_new_request", request)
        policy: OffloadPolicy | None = self.policy
        return policy

    @hookimpl
    def on_request_finished(self, request: RequestInfo) -> None:
        """Notes what it was not given, in ``not_stored``."""
        self.not_stored[request.request_id] = tuple(request.not_stored)
        self._enter("on_request_finished", request)

    @hookimpl
    def reset(self, namespace: str, description: Mapping[str, Any]) -> None:
        """Serves *namespace* from now on; held jobs stay with the old one."""
        self._enter("reset")
        self.namespace = namespace
        self.blocks.setdefault(namespace, {})

    @hookimpl
    def shutdown(self, timeout_s: float) -> None:
        """Nothing to stop."""
        self._enter("shutdown")
