"""The coordinator: which blocks are where, what moves next, what a fault costs.

Pure: events and the time come in, answers go out, and orders wait in an outbox (``take_actions``). No thread, clock,
I/O or logging. Used by the engine's thread alone.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from kvtier_core.coordinator import leases
from kvtier_core.coordinator.actions import (
    Action,
    TellNewRequest,
    TellStepEnd,
    TellTouched,
)
from kvtier_core.coordinator.cascades import Cascades
from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_core.coordinator.holds import holds_of
from kvtier_core.coordinator.jobs import Job, JobKind
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.coordinator.lookups import Lookups
from kvtier_core.coordinator.prefetches import Prefetches
from kvtier_core.coordinator.presence import ResidentPresence
from kvtier_core.coordinator.promotions import Promotions
from kvtier_core.coordinator.request_level import RequestLevel
from kvtier_core.coordinator.request_state import RequestState
from kvtier_core.coordinator.results import Arrived, Finished, Results
from kvtier_core.coordinator.state import State
from kvtier_core.coordinator.stats import Counters
from kvtier_core.coordinator.tier_record import TierSpec
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import READY, Block, Ledger
from kvtier_core.policies.base import EvictionPolicy
from kvtier_core.values import Lookup, MissReason, PreparedTransfer, RequestInfo


class Coordinator:
    """Decides for one pool and the tiers behind it. *groups* are the KV groups that share the pool, in order.

    Methods that take a request's id raise ``UnknownRequestError`` for one that never began or is over.
    """

    def __init__(
        self,
        num_rows: int,
        policy: EvictionPolicy[Block],
        tiers: Sequence[TierSpec],
        limits: PoolLimits,
        groups: Sequence[GroupShape] = (GroupShape(),),
    ) -> None:
        self._state = State(Ledger(num_rows, policy), tiers, limits)
        self._lookups = Lookups(self._state, groups)
        self._prefetches = Prefetches(self._state, self._lookups)
        self._promotions = Promotions(self._state)
        self._cascades = Cascades(self._state)
        self._request_level = RequestLevel(self._state, self._cascades)
        self._results = Results(self._state, self._cascades, self._promotions, self._request_level)

    def set_recompute_cost(self, seconds_a_token: float | None) -> None:
        """What computing costs the engine; with ``None`` whatever a tier holds is worth loading (C35)."""
        self._lookups.break_even.recompute_s = seconds_a_token

    # -- requests

    def new_request(
        self,
        info: RequestInfo,
        now: float,
        *,
        load_tiers: Collection[str] | None = None,
        store_tiers: Collection[str] | None = None,
        pin_rows: int | None = None,
    ) -> None:
        """A request begins. *pin_rows* are the rows that the bytes fill which its hints pin.

        Raises ``ValueError`` while another one of that id is not wholly over.
        """
        state = self._state
        if info.request_id in state.requests:
            raise ValueError(f"request {info.request_id!r} is still known: request ids must be unique")
        info = replace(info)  # this very object tells the request from later ones of its id
        if info.hints.drop and not info.wants_remote_decode:
            store_tiers = ()
        request = RequestState(info, load_tiers, store_tiers, now, holds=holds_of(info.hints, pin_rows))
        state.counters.hints.update(info.hints.count())
        state.requests[info.request_id] = request
        if info.wants_remote_decode:
            for name in state.tiers:
                self._request_level.begin(request, name)
        state.outbox.extend(TellNewRequest(name, info) for name in state.tiers)

    def on_request_level(self, tier_name: str, info: RequestInfo) -> None:
        """A tier asked for the whole of a request (C25). Ignored once the request is over."""
        request = self._state.requests.get(info.request_id)
        if request is not None and request.info is info:
            self._request_level.begin(request, tier_name)

    def is_request_level(self, request_id: str) -> bool:
        """Whether a tier gets the whole request, so that blocks in the pool are worth offering."""
        return bool(self._state.known(request_id).whole)

    def misses(self, request_id: str) -> dict[OffloadKey, MissReason]:
        """The keys at which the request's lookups ended, and why each missed last (C60)."""
        return dict(self._state.known(request_id).missed)

    def request_begins(self, request_id: str) -> None:
        """The engine starts the request, or starts it again: what it computes from now on may be stored (C04)."""
        self._state.going_on(request_id).may_store = True

    def request_preempted(self, request_id: str) -> None:
        """The engine took the request's device blocks: nothing is stored for it until ``request_begins`` (C04)."""
        self._state.going_on(request_id).may_store = False

    def may_store(self, request_id: str) -> bool:
        """Whether neither a reset nor a preemption came since the request began (C04)."""
        return self._state.going_on(request_id).may_store

    def request_finished(self, request_id: str) -> None:
        """A request ended or was aborted: its leases go back. Tiers learn of it once its last store has left."""
        request = self._state.known(request_id)
        request.finished = True
        self._prefetches.end(request)
        self._request_level.lost(self._promotions.hand_over_planned(request))
        leases.give_back(self._state, request)
        self._drop(request)
        self._state.forget_if_over(request)

    # -- lookups and device transfers

    def lookup(self, request_id: str, keys: Sequence[Sequence[OffloadKey]], now: float) -> Lookup:
        """How much of a prompt can be loaded; starts what would make it more (C10, C21).

        ``keys[i]`` are the loadable blocks of the i-th group, from the prompt's beginning. Equal tuples are not looked
        at again while the answer is pending.
        """
        request = self._state.going_on(request_id)
        self._prefetches.end(request)
        return self._lookups.lookup(request, keys, now)

    def prefetch(self, request_id: str, keys: Sequence[Sequence[OffloadKey]]) -> None:
        """Bring the prompt *keys* from tiers to the pool, step by step, until the request looks up by itself."""
        self._prefetches.add(self._state.going_on(request_id), keys)

    def loadable(self, keys: Sequence[Sequence[OffloadKey]]) -> int:
        """The longest end point of the prompt *keys* that could be loaded at once."""
        return self._lookups.loadable(keys)

    def ends(
        self, request_id: str, keys: Sequence[Sequence[OffloadKey]], now: float, *, at_once: bool = False
    ) -> list[int]:
        """Every end point whose blocks the pool or a tier has, or the pool *at_once*, in order.

        Only ``lookup`` promises one of them.
        """
        return self._lookups.ends(self._state.going_on(request_id), keys, now, at_once=at_once)

    def has_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether the pool has all of these blocks, ready."""
        return all(self._state.ledger.are_ready(keys))

    def prepare_load(self, request_id: str, keys: Sequence[OffloadKey]) -> PreparedTransfer:
        """Pin the leading blocks of *keys* that are still there; after a reset these may be fewer than promised.

        Blocks of several groups come in the order of the tokens they end at.
        """
        state = self._state
        request = state.going_on(request_id)
        request.pending = None
        held = state.ledger.ready_prefix(keys)
        if not held:
            return PreparedTransfer(0, (), ())
        blocks = state.ledger.blocks_of(held)
        state.ledger.pin(blocks)
        self._keep(request, held, request.last_lookup)
        if leases.end(state, request, held) < len(held):
            leases.use(state, request, blocks, range(-len(blocks), 0))
        job = state.start_job(JobKind.DEVICE_LOAD, request, held, blocks, float("inf"))
        sources = ["pool"] * len(blocks)
        touched = held
        if request.waited:
            sources = [
                block.source if block.source and block.key in request.waited else "pool" for block in blocks
            ]
            loaded = {key for key, source in zip(held, sources, strict=True) if source != "pool"}
            touched = [key for key in held if key not in loaded]
        state.counters.hits.update(sources)
        if touched:
            state.outbox.extend(
                TellTouched(tier.name, touched, request.info.chain)
                for tier in state.tiers.values()
                if tier.serving
            )
        rows = [block.row for block in blocks]
        return PreparedTransfer(job.id, held, rows, sources=sources)

    def complete_load(self, job_id: int, *, success: bool = True) -> None:
        """A device load ended, well or not: its rows are no longer read."""
        job = self._state.end_job(job_id)
        assert job.kind is JobKind.DEVICE_LOAD, job
        self._state.ledger.unpin(job.blocks)
        self._state.counters.device_loaded += len(job.blocks) if success else 0

    def prepare_store(
        self, request_id: str, keys: Sequence[OffloadKey], now: float
    ) -> PreparedTransfer | None:
        """Rows for new blocks (C11). ``None`` when the room can't be made; no keys when nothing is new.

        No keys after a reset or a preemption (C04): the device blocks may be others' by now, or of other weights.
        """
        request = self._state.going_on(request_id)
        if not request.may_store:
            return PreparedTransfer(0, (), ())
        for lost in request.not_loaded.values():
            for key in keys:
                lost.pop(key, None)
        prepared = self._cascades.prepare(request, keys, now, admit_all=bool(request.whole))
        self._keep(request, keys, now)
        self._request_level.offer(request, keys, prepared.keys if prepared is not None else (), now)
        return prepared

    def complete_store(self, job_id: int, *, success: bool, now: float) -> None:
        """A device store ended (C12)."""
        job = self._state.end_job(job_id)
        assert job.kind is JobKind.DEVICE_STORE, job
        self._cascades.complete(job, success=success, now=now)
        if not job.overdue:
            self._request_level.arrived(job.blocks, job.request, now)
        if job.request.info.hints.drop:
            ready = [block.key for block in job.blocks if block.state is READY]
            job.request.to_drop.update(dict.fromkeys(ready))
            if job.request.finished:
                self._drop(job.request)
        self._state.forget_if_over(job.request)

    # -- hints

    def _keep(self, request: RequestState, keys: Sequence[OffloadKey], now: float) -> None:
        if request.holds:
            self._state.counters.not_kept += self._state.holds.take(request.holds, keys, now)

    def _drop(self, request: RequestState) -> None:
        """Take out of the pool what *request* has stored and no other request has used."""
        state = self._state
        dropped = [
            block
            for block in state.ledger.find_all(request.to_drop)
            if block is not None and state.ledger.is_idle(block) and block.chain == request.info.chain
        ]
        request.to_drop.clear()
        state.note_evicted([block.key for block in dropped])
        state.detach(dropped)

    # -- time

    def end_step(self, step: int, now: float) -> None:
        """The engine's step is over: its promotions leave as one job per (tier, request).

        Tiers that got a job in this step get a ``TellStepEnd``.
        """
        self._prefetches.go_on(now)
        self._promotions.submit_planned(now)
        for tier in self._state.tiers.values():
            if tier.has_jobs_this_step:
                tier.has_jobs_this_step = False
                self._state.outbox.append(TellStepEnd(tier.name, step))

    def tick(self, now: float, arrived: Arrived = lambda _job_id: ()) -> None:
        """Give up the jobs whose deadline has passed; *arrived* says what has come of the loads among them."""
        while (job := self._state.jobs.next_due(now)) is not None:
            self._state.give_up(job)
            self._results.expire(job, arrived, now)
        leases.expire(self._state, now)
        self._state.holds.expire(now)
        self._cascades.make_up(now)

    # -- results

    def on_sealed(self, job_id: int) -> None:
        """The rows of a ``SealRows`` have their proofs."""
        job = self._state.end_job(job_id)
        assert job.kind is JobKind.SEAL, job
        self._state.ledger.unpin(job.blocks)

    def on_finished(self, finished: Finished, now: float) -> None:
        """A tier handed out the one result of one of its jobs."""
        self._results.finish(finished, now)

    def on_fault(self, tier_name: str, now: float, *, of_job: bool = False) -> None:
        """A hook raised or answered nonsense; with *of_job* the job's result will tell the breakers."""
        tier = self._state.tiers[tier_name]
        tier.counters.faults += 1
        for service in () if of_job else tier.services:
            service.breaker.failed(now)

    # -- reset

    def reset(self, *, tiers: bool) -> None:
        """A new cache epoch (C34): no block of the pool answers any more; with *tiers*, none of the tiers' either.

        Rows under transfer stay out of use until their transfer is over (C36).
        """
        state = self._state
        for request in state.requests.values():
            leases.give_back(state, request)
            request.may_store = False
            request.waited.clear()
            request.not_loaded.clear()
            request.wait_until = None
        self._promotions.drop_planned()
        for job in state.jobs.values():
            job.stale = job.stale or tiers
            if job.overdue:
                continue
            if job.kind is JobKind.TIER_LOAD:
                self._withdraw(job)
                self._promotions.quarantine(job)
            elif job.kind is JobKind.DEVICE_STORE:
                state.give_up(job)
                self._cascades.expire_device_store(job)
            elif job.kind is JobKind.LOOKUP and tiers:
                self._withdraw(job)
        state.detach(state.ledger.blocks)
        self._request_level.reset()
        state.evicted.clear()
        for tier in state.tiers.values():
            tier.missed.clear()
        if tiers:
            for tier in state.tiers.values():
                tier.presence.clear()
                tier.serving = False

    def _withdraw(self, job: Job) -> None:
        """Give *job* up. Its result will say nothing about the tier."""
        self._state.give_up(job)
        self._state.tiers[job.tier].service(job.kind).breaker.withdrawn()

    def tier_ready(self, tier_name: str, resident: ResidentPresence | None) -> None:
        """A tier serves the current namespace from now on. *resident* is its set of keys, if it has one."""
        tier = self._state.tiers[tier_name]
        tier.presence.resident = resident
        tier.serving = True

    # -- what the acting part reads

    def take_actions(self) -> list[Action]:
        """The actions since the last call, in order."""
        actions, self._state.outbox = self._state.outbox, []
        return actions

    def next_deadline(self) -> float | None:
        """When ``tick`` must be called at the latest; ``None`` when no job is waited for."""
        return self._state.jobs.next_deadline()

    def skip_jobs(self, count: int) -> None:
        """Begin to number jobs so much higher: the device has had that many already."""
        self._state.next_job += count

    def store_room(self, now: float) -> int:
        """Blocks that could be stored now without any tier having to leave one out (C28), those under way counted."""
        state = self._state
        rooms = [
            tier.max_cascade_rows - tier.cascade_rows - len(tier.late)
            for tier in state.tiers.values()
            if tier.may_store(now)
        ]
        if not rooms:
            return state.ledger.num_rows
        return min(*rooms, state.limits.max_cascade_rows - state.cascade_rows) - state.jobs.storing_rows

    @property
    def max_store_room(self) -> int:
        """``store_room`` when no tier is behind: no store of more blocks reaches every tier whole."""
        state = self._state
        rooms = [tier.max_cascade_rows for tier in state.tiers.values()]
        return min(*rooms, state.limits.max_cascade_rows) if rooms else state.ledger.num_rows

    @property
    def has_pending_work(self) -> bool:
        """Whether a job that somebody waits for is under way, or a promotion waits for the end of the step."""
        return self._state.jobs.num_awaited > 0 or bool(self._state.planned)

    @property
    def is_catching_up(self) -> bool:
        """Whether a tier gets more of what it missed as soon as the stores that it has are over (C28)."""
        return any(tier.is_catching_up for tier in self._state.tiers.values())

    @property
    def counters(self) -> Counters:
        """The counters; they go on counting."""
        return self._state.counters

    @property
    def state(self) -> State:
        """The whole state, for tests, the simulator and reports. Reading only."""
        return self._state
