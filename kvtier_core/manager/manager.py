"""The manager acts on what the coordinator decides: it owns the clock and the queue of events.

All public methods belong to one thread, the engine's, except ``notify``. None of them waits for a tier but ``open``,
``wait`` and ``shutdown``, each bounded by its timeout.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from queue import Empty, SimpleQueue
from typing import Any, assert_never

from kvtier_core.coordinator.coordinator import Coordinator
from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.coordinator.results import Finished
from kvtier_core.coordinator.stats import Counters
from kvtier_core.errors import ClosedError, TierOpenError
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import Block
from kvtier_core.manager.changes import EventLog
from kvtier_core.manager.events import (
    Event,
    OpenFailed,
    Sealed,
    Serving,
    TierFault,
    Wake,
    WholeRequest,
)
from kvtier_core.manager.figures import figures
from kvtier_core.manager.path_log import PathLog
from kvtier_core.manager.tier_filter import resolve_filters
from kvtier_core.manager.tiers import TierBuild, Tiers
from kvtier_core.namespace import Namespace
from kvtier_core.policies.base import EvictionPolicy
from kvtier_core.transfer.pool import Pool
from kvtier_core.transfer.waiting import bounded
from kvtier_core.values import Lookup, MissReason, PreparedTransfer, RequestInfo, TierEvent


class TierManager:
    """One pool, the tiers behind it, and the deciding part between them.

    Whatever takes a request's id raises ``UnknownRequestError`` for one that never began or is over.
    """

    def __init__(  # noqa: PLR0913 - all of them by name
        self,
        *,
        pool: Pool,
        namespace: Namespace,
        tiers: Sequence[TierBuild],
        policy: EvictionPolicy[Block],
        limits: PoolLimits,
        reset_tiers: bool = True,
        as_one_prefix: bool = False,
        clock: Callable[[], float] = time.monotonic,
        log: logging.Logger | None = None,
    ) -> None:
        self.namespace = namespace
        self._log = log if log is not None else logging.getLogger("kvtier")
        self._pool = pool
        self._clock = clock
        self._reset_tiers = reset_tiers
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._tiers = Tiers(tiers, namespace, pool, clock, self._events.put, self._log, limits.check_threads)
        self._path_log = PathLog(self._tiers.guards)
        self._unopened = {build.name: build.limits.open_retry is not None for build in tiers}
        """Tiers that have not been opened, or tried, and whether the engine starts without each."""
        self._failed_open: OpenFailed | None = None
        self._generation = 0
        self._step = 0
        self._collected = False
        self._closed = False
        shapes = [
            GroupShape(namespace.tokens_of(group), group.window) for group in namespace.cached_groups.values()
        ]
        self.group_shapes = [GroupShape(shapes[0].tokens_per_block)] if as_one_prefix else shapes
        self._coordinator = Coordinator(pool.geometry.num_rows, policy, tiers, limits, self.group_shapes)
        self._pool_events = EventLog()

    # -- life

    def open(self, timeout_s: float) -> None:
        """Build and open every tier, all at once; wait until each serves.

        Raises ``TierOpenError``, naming the tier, when one can't open or takes longer than *timeout_s*. A tier with
        ``limits.open_retry`` is left out instead until it has opened.
        """
        self._tiers.start()
        deadline = self._clock() + bounded(timeout_s)
        while self._unopened and self._failed_open is None:
            if not self._next_event(deadline):
                self._go_on_without(timeout_s)
                return
        if (failed := self._failed_open) is not None:
            error = TierOpenError(f"{self._tiers.ports[failed.tier].identity} could not open: {failed.error}")
            error.is_explained = failed.is_explained
            raise error

    def _go_on_without(self, timeout_s: float) -> None:
        names = ", ".join(str(self._tiers.ports[name].identity) for name in sorted(self._unopened))
        text = f"{names} did not open within {timeout_s:g} s: check its storage"
        if not all(self._unopened.values()):
            raise TierOpenError(text)
        self._log.warning("%s; it serves once it has opened", text)

    def reset_cache(self, *, everywhere: bool = False) -> None:
        """Start a new cache epoch (C34): from now on nothing stored so far answers. Does not wait for any tier.

        *everywhere* includes the tiers whatever ``on_reset`` says: for an engine whose weights have changed.
        """
        self._ensure_open()
        self._collect()
        tiers = self._reset_tiers or everywhere
        self._coordinator.reset(tiers=tiers)
        if tiers:
            self._generation += 1
            self.namespace = self.namespace.next_epoch()
            self._tiers.reset(self.namespace, self._generation)
        self._act()

    def shutdown(self, timeout_s: float) -> bool:
        """Shut every tier down, all at once, within *timeout_s*. Twice is fine.

        Returns whether all confirmed that they no longer touch the pool; only then may its mapping be freed.
        """
        self._closed = True
        return self._tiers.shutdown(bounded(timeout_s))

    def _ensure_open(self) -> None:
        if self._closed:
            raise ClosedError("the manager was shut down")

    def set_recompute_cost(self, seconds_a_token: float | None) -> None:
        """What computing costs the engine (C35); ``None`` where it does not know. Raises ``ValueError`` for no time."""
        if seconds_a_token is not None and not 0 <= seconds_a_token < math.inf:
            raise ValueError(f"a recompute cost must be seconds a token, at least 0, not {seconds_a_token!r}")
        self._coordinator.set_recompute_cost(seconds_a_token)

    # -- requests

    def new_request(
        self,
        info: RequestInfo,
        *,
        load_tiers: Collection[str] | None = None,
        store_tiers: Collection[str] | None = None,
    ) -> None:
        """A request begins, which may use these tiers alone and those that its parameters allow (C27).

        Raises ``ValueError`` while another one of that id is not wholly over, and for tiers that there are not.
        """
        self._ensure_open()
        load, store = resolve_filters(info.params, load_tiers, store_tiers, list(self._tiers.ports))
        bytes_to_pin = info.hints.pin_bytes
        pin_rows = None if bytes_to_pin is None else bytes_to_pin // self._pool.geometry.row_bytes
        self._coordinator.new_request(
            info, self._clock(), load_tiers=load, store_tiers=store, pin_rows=pin_rows
        )
        self._act()

    def is_request_level(self, request_id: str) -> bool:
        """Whether a tier gets this request as a whole, as far as the tiers have said by now (C25)."""
        self._collect_once()
        return self._coordinator.is_request_level(request_id)

    def misses(self, request_id: str) -> dict[OffloadKey, MissReason]:
        """The keys at which the request's lookups ended, and why each missed last (C60)."""
        return self._coordinator.misses(request_id)

    def request_begins(self, request_id: str) -> None:
        """The engine has computed nothing yet for the request, or gave it up: what follows may be stored (C04)."""
        self._coordinator.request_begins(request_id)

    def request_preempted(self, request_id: str) -> None:
        """The engine took the request's device blocks. Nothing is stored for it until ``request_begins`` (C04)."""
        self._coordinator.request_preempted(request_id)

    def may_store(self, request_id: str) -> bool:
        """Whether ``reserve_store`` may give rows: neither a reset nor a preemption came since the request began."""
        return self._coordinator.may_store(request_id)

    def request_finished(self, request_id: str) -> None:
        """A request ended or was aborted."""
        self._coordinator.request_finished(request_id)
        self._act()

    def lookup(self, request_id: str, keys: Sequence[Sequence[OffloadKey]]) -> Lookup:
        """How much of a prompt can be loaded (C10), by the keys of each group. No I/O, no waiting."""
        self._collect_once()
        answer = self._coordinator.lookup(request_id, keys, self._clock())
        self._act()
        return answer

    def prefetch(self, request_id: str, keys: Sequence[Sequence[OffloadKey]]) -> None:
        """Bring the prompt *keys* from tiers to the pool in the steps that follow, until the request asks itself."""
        self._coordinator.prefetch(request_id, keys)

    def loadable(self, keys: Sequence[Sequence[OffloadKey]]) -> int:
        """Up to which token of a prompt all groups could be loaded at once."""
        return self._coordinator.loadable(keys)

    def ends(
        self, request_id: str, keys: Sequence[Sequence[OffloadKey]], *, at_once: bool = False
    ) -> list[int]:
        """Every token, in order, up to which the pool and the tiers have what all groups need, as far as is known.

        With *at_once* the pool alone. For engines whose ranks agree on one of them. Only ``lookup`` promises, and
        fetches for, the longest.
        """
        ends = self._coordinator.ends(request_id, keys, self._clock(), at_once=at_once)
        self._act()
        return ends

    def has_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether the pool has all of these blocks, ready to be loaded."""
        return self._coordinator.has_all(keys)

    def reserve_load(self, request_id: str, keys: Sequence[OffloadKey]) -> PreparedTransfer:
        """Pin rows for a device load; end it with ``commit_load`` when it names keys.

        Blocks of several groups come in the order of the tokens they end at.
        """
        prepared = self._coordinator.prepare_load(request_id, keys)
        self._act()
        return prepared

    def commit_load(self, job_id: int, *, success: bool = True) -> None:
        """A device load ended, well or not."""
        self._coordinator.complete_load(job_id, success=success)

    def reserve_store(self, request_id: str, keys: Sequence[OffloadKey]) -> PreparedTransfer | None:
        """Rows for a device store (C11); end it with ``commit_store`` when it names keys.

        ``None`` when the room can't be made; no keys when nothing is new, or while ``may_store`` says no.
        """
        self._collect_once()
        prepared = self._coordinator.prepare_store(request_id, keys, self._clock())
        self._act()
        return prepared

    def commit_store(self, job_id: int, *, success: bool) -> None:
        """A device store ended."""
        self._coordinator.complete_store(job_id, success=success, now=self._clock())
        self._act()

    # -- steps and waiting

    def end_step(self) -> None:
        """The engine's step is over: hand out its promotions."""
        self._collect_once()
        self._coordinator.end_step(self._step, self._clock())
        self._step += 1
        self._collected = False
        self._act()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something happened that may change an answer, at most *timeout_s*. Whether it did."""
        self._act()
        self._collected = False
        return self._next_event(self._clock() + bounded(timeout_s))

    def notify(self) -> None:
        """Wake a ``wait``, from any thread."""
        self._events.put(Wake())

    @property
    def store_room(self) -> int:
        """Blocks that could be stored now without any tier having to leave one out."""
        return self._coordinator.store_room(self._clock())

    @property
    def max_store_room(self) -> int:
        """``store_room`` when no tier is behind."""
        return self._coordinator.max_store_room

    @property
    def has_pending_work(self) -> bool:
        """Whether a job that somebody waits for is under way. Quarantined jobs are not (C31)."""
        return self._coordinator.has_pending_work

    @property
    def is_catching_up(self) -> bool:
        """Whether a tier gets more of what it missed once its stores are over, in a ``wait`` or an ``end_step``."""
        return self._coordinator.is_catching_up

    def take_events(self) -> list[tuple[str, TierEvent]]:
        """What changed in the pool and the tiers since the last call (C16), each with its place: ``pool`` or a tier.

        The first answer for each place is its whole contents. A replay gives the exact contents of the pool and of each
        tier that this process alone changes and whose contents the core knows.
        """
        ledger = self._coordinator.state.ledger
        ledger.note = self._pool_events.record
        events = [("pool", event) for event in self._pool_events.take(ledger.ready_keys)]
        for name, port in self._tiers.ports.items():
            events += [(name, event) for event in port.take_events()]
        return events

    def figures(self) -> dict[str, Any]:
        """Counters since the start, and each tier's place in the path, ready for JSON. Cost: 10 us a tier."""
        return figures(self._coordinator, self._tiers.ports, self._pool.geometry.row_bytes)

    @property
    def counters(self) -> Counters:
        """The counters; they go on counting."""
        return self._coordinator.counters

    @property
    def coordinator(self) -> Coordinator:
        """The deciding part, for tests and reports. Reading only."""
        return self._coordinator

    def _collect_once(self) -> None:
        """Take in what the tiers reported, once a step (C24)."""
        if not self._collected:
            self._collected = True
            self._collect()

    def _collect(self) -> None:
        for _ in range(self._events.qsize()):  # no more: a tier may report as fast as they are taken in
            self._handle(self._events.get_nowait())
        self._coordinator.tick(self._clock(), self._tiers.arrived)
        self._path_log.look(self._coordinator.state.tiers, self._clock())
        self._act()

    def _next_event(self, deadline: float) -> bool:
        """Sleep until an event or a job's deadline, or until *deadline*; then take in all there is."""
        while True:
            now = self._clock()
            due = self._coordinator.next_deadline()
            until = deadline if due is None else min(deadline, due)
            try:
                event = self._events.get(timeout=max(0.0, until - now))
            except Empty:
                event = None
            if event is not None:
                self._handle(event)
            self._collect()
            if event is not None or (due is not None and due <= self._clock()):
                return True
            if self._clock() >= deadline:
                return False

    def _handle(self, event: Event) -> None:
        match event:
            case Finished():
                self._coordinator.on_finished(event, self._clock())
            case TierFault(tier, of_job):
                self._coordinator.on_fault(tier, self._clock(), of_job=of_job)
            case Sealed(job_id):
                self._coordinator.on_sealed(job_id)
            case Serving(tier, generation, resident):
                if generation == self._generation:
                    self._unopened.pop(tier, None)
                    self._coordinator.tier_ready(tier, resident)
            case OpenFailed():
                self._on_open_failed(event)
            case WholeRequest(tier, request):
                self._coordinator.on_request_level(tier, request)
            case Wake():
                return
            case _:
                assert_never(event)

    def _on_open_failed(self, event: OpenFailed) -> None:
        if event.is_reset:
            self._coordinator.on_fault(event.tier, self._clock())
        elif event.will_retry:
            self._unopened.pop(event.tier, None)
        else:
            self._failed_open = self._failed_open or event

    # -- acting

    def _act(self) -> None:
        for action in self._coordinator.take_actions():
            self._tiers.do(action)
