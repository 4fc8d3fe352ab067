"""``TierPort``: what the manager asks of one tier, whichever interface its author chose, and the tier's own thread.

There are two ports: ``BlockingTier`` for subclasses of ``BlockTier``, ``HookTier`` for plugins on the hook specs.

A tier that can't open is tried again where ``limits.open_retry`` is set. One that can't follow a reset is always tried
again: as a rule calls of before still run, and end. The manager decides whether the engine starts without the tier.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.coordinator.presence import ResidentPresence
from kvtier_core.errors import KvtierError, TierOpenError
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.events import Event, OpenFailed, Serving, TierFault
from kvtier_core.manager.guard import Guard, HookFault, text_of
from kvtier_core.manager.inbox import CallQueue
from kvtier_core.proof import PROOF_BYTES
from kvtier_core.tier_settings import TierLimits
from kvtier_core.values import JobResult, PoolView, RequestInfo, TierContext, TierEvent, TierInfo, TierJob

_RESET_RETRY_S = 5.0
"""Pause before a failed reset is tried again, unless ``limits.open_retry`` says another: what hangs takes its time."""
_NO_PROOF = bytes(PROOF_BYTES)


@dataclass(frozen=True, kw_only=True)
class TierHome:
    """What a port gets from the manager."""

    guard: Guard
    info: TierInfo
    limits: TierLimits
    context: TierContext
    row: Callable[[int], memoryview]
    """A writable view of a row of the pool; each call makes one of its own."""
    clock: Callable[[], float]
    """Seconds, for deadlines."""
    wall: Callable[[], float] = time.time
    """Seconds since the epoch, for the age of blocks."""
    emit: Callable[[Event], None]
    finish: Callable[[JobResult], None]

    def row_to_store(self, row: int) -> memoryview:
        """The row as a tier gets it for a store: read-only."""
        return self.row(row).toreadonly()

    def row_to_load(self, row: int) -> memoryview:
        """The row as a tier gets it for a load: writable, without the proof of what it held.

        The row may hold the same block from an earlier time. A tier that says that the block has arrived, and writes
        it only then, would be believed.
        """
        view = self.row(row)
        view[-PROOF_BYTES:] = _NO_PROOF
        return view


class TierPort(ABC):
    """One tier. The public methods may be called from any thread, and return at once, except ``wait_down``.

    All others are for the tier's thread. Each job that is submitted ends with one call of ``TierHome.finish``.
    Everything else is reported by events.
    """

    listens = False
    """Whether the tier wants to know about requests and steps; only then are they told."""
    loads_on_our_threads = False
    """Whether loads are told of, and answered, on threads of the core: their proofs are checked there."""

    def __init__(self, home: TierHome, calls: CallQueue) -> None:
        self.identity = home.guard.identity
        self._home = home
        self._guard = home.guard
        self._calls = calls
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{self.identity.name}", daemon=True)
        self._pool: PoolView | None = None
        self._stopping = False
        self._shutdowns: SimpleQueue[float] = SimpleQueue()
        """How long each shutdown may take that was asked for and has not begun."""
        self._tried = threading.Condition()  # guards the three below
        self._num_asked = self._num_tried = 0
        """Shutdowns that were asked for, and those of them that are over, well or not."""
        self._is_down = False
        self._is_open = False
        """Whether the tier has been opened. Only then may it be called otherwise."""
        self._wanted: Callable[[], str | None] | None = None
        """Takes the tier to the namespace that is wanted, where it is not there yet; returns why it could not."""
        self._can_go_over = True
        self._generation = 0
        """The number of that namespace."""
        self._retry_at: float | None = None
        """When to try again; ``None`` when there is no need, or no use."""

    # -- for any thread

    def start(self, pool: PoolView | None) -> None:
        """Build the tier and open it on a thread of its own, reported as ``Serving`` or ``OpenFailed``."""
        self._pool = pool
        self._calls.put(self._get_ready)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads can be had
            self._report_failed(str(error), is_explained=False)

    @abstractmethod
    def submit(self, kind: JobKind, job: TierJob) -> None:
        """Hand a lookup, load or store to the tier. The port gets the job's buffers by its rows."""

    @abstractmethod
    def cancel(self, job_ids: Sequence[int]) -> None:
        """Nobody waits for these jobs any more. Their results are still due."""

    @abstractmethod
    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks gave wrong bytes: the tier is to forget them."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], chain: int) -> None:
        """The request with the number *chain* used these blocks from the pool, its beginning first."""

    @abstractmethod
    def take_events(self) -> list[TierEvent]:
        """What changed in the tier since the last call; nothing where the core does not know what it holds."""

    @abstractmethod
    def resident(self) -> ResidentPresence | None:
        """The keys that the tier holds, until the next reset; ``None`` where it has to be asked."""

    def begin_request(self, request: RequestInfo) -> None:  # noqa: B027 - for a tier that listens
        """A request begins. Comes before its jobs."""

    def end_request(self, request: RequestInfo, not_stored: Sequence[OffloadKey]) -> None:  # noqa: B027 - as above
        """A request is over. Comes after its last job; the tier was never given *not_stored*."""

    def end_step(self, step: int) -> None:  # noqa: B027 - as above
        """The jobs of an engine's step have been submitted."""

    def reset(self, namespace: str, description: Mapping[str, Any], generation: int) -> None:
        """Serve *namespace* from now on, reported as ``Serving`` with this *generation*."""
        self._calls.put(partial(self._reset, namespace, description, generation))

    def shutdown(self, timeout_s: float) -> None:
        """Begin to shut the tier down, within *timeout_s*, or try again when the last try ended without success."""
        with self._tried:
            self._num_asked += 1
        self._shutdowns.put(timeout_s)
        self._calls.put(self._stop)

    def wait_down(self, timeout_s: float) -> bool:
        """Wait for the last ``shutdown`` to end. Whether the tier has confirmed that it no longer touches the pool.

        A tier that was never started is down.
        """
        with self._tried:
            is_started = self._thread.ident is not None
            self._tried.wait_for(
                lambda: not is_started or self._is_down or 0 < self._num_asked == self._num_tried, timeout_s
            )
            return not is_started or self._is_down

    # -- the tier's thread, of each kind of port

    @abstractmethod
    def _open(self) -> None:
        """Build the tier where there is none yet, and open it. Raises what the tier raises."""

    @abstractmethod
    def _go_over(self, namespace: str, description: Mapping[str, Any]) -> None:
        """Serve this namespace from now on. Raises what the tier raises."""

    @abstractmethod
    def _pause(self) -> float | None:
        """How long to wait for the next call; ``None`` for ever."""

    @abstractmethod
    def _turn(self) -> None:
        """Do what is due, after each call and each pause."""

    @abstractmethod
    def _close(self, timeout_s: float) -> bool:
        """Shut the tier down, again where that did not succeed. Whether it no longer touches the pool."""

    # -- the tier's thread

    def _run(self) -> None:
        while not self._stopping:
            call = self._calls.get(self._pause())
            if call is not None:
                self._guarded(call)
            if not self._stopping:
                self._guarded(self._turn)
            is_due = self._retry_at is not None and self._retry_at <= self._home.clock()
            if is_due and not self._stopping:
                self._guarded(self._get_ready)
        while not self._is_down:
            timeout_s = self._shutdowns.get()
            is_down = self._guard.call("shutdown", self._close, timeout_s=timeout_s) is True
            with self._tried:
                self._is_down = is_down
                self._num_tried += 1
                self._tried.notify_all()

    def _guarded(self, work: Callable[[], None], what: str = "the tier's thread") -> None:
        """Do a piece of *work*. An answer so odd that it trips us must not end the thread."""
        if isinstance(self._guard.call(what, work), HookFault):
            self._fault()

    def _fault(self) -> None:
        self._home.emit(TierFault(self.identity.name))

    def _reset(self, namespace: str, description: Mapping[str, Any], generation: int) -> None:
        self._generation = generation
        self._wanted = partial(self._try_to_go_over, namespace, description)
        self._get_ready()

    def _stop(self) -> None:
        self._stopping = True

    def _get_ready(self) -> None:
        """Open the tier and take it to the namespace that is wanted, where that is still to be done; report it."""
        is_retry, self._retry_at = self._retry_at is not None, None
        failed = self._attempt()
        name = self.identity.name
        if failed is None:
            if is_retry:
                self._guard.tell(f"is open now: it serves from here on{self._guard.take_untold()}")
            self._home.emit(Serving(name, self._generation, self.resident()))
            return
        self._retry_at = self._next_try()
        if not is_retry:  # an idle engine takes no events in: later tries tell it nothing new
            error, is_explained = failed
            self._report_failed(error, is_explained=is_explained)

    def _report_failed(self, error: str, *, is_explained: bool) -> None:
        will_retry = self._retry_at is not None
        failed = OpenFailed(
            self.identity.name,
            error,
            is_explained=is_explained,
            will_retry=will_retry,
            is_reset=self._is_open,
        )
        self._home.emit(failed)

    def _attempt(self) -> tuple[str, bool] | None:
        """Why the tier does not serve yet, and whether that says what to do; ``None`` when it does."""
        failed = None if self._is_open else self._try_to_open()
        if failed is None and self._wanted is not None:
            error = self._wanted()
            if error is not None:
                return error, False
            self._wanted = None
        return failed

    def _next_try(self) -> float | None:
        pause = self._home.limits.open_retry
        if self._is_open:
            pause = pause or _RESET_RETRY_S if self._can_go_over else None
        return None if pause is None else self._home.clock() + pause

    def _try_to_open(self) -> tuple[str, bool] | None:
        try:
            self._open()
        except BaseException as error:  # noqa: BLE001 - somebody else's code
            self._guard.debug("open", error)
            kind = "" if isinstance(error, TierOpenError) else f"{type(error).__name__}: "
            text = self._guard.mask(kind + text_of(error))
            if self._home.limits.open_retry is not None:
                self._guard.report("open", f"it could not open: {text}", kind=type(error).__name__)
            return text, isinstance(error, KvtierError) and error.is_explained
        self._is_open = True
        return None

    def _try_to_go_over(self, namespace: str, description: Mapping[str, Any]) -> str | None:
        if not self._can_go_over:
            text = "the tier has no reset hook, so it is left out until the next start"
            return self._guard.report("reset", text).text
        answer = self._guard.call("reset", self._go_over, namespace=namespace, description=description)
        return answer.text if isinstance(answer, HookFault) else None


MakePort = Callable[[TierHome], TierPort]
"""Makes the port of a configured tier; does no I/O."""
