"""The state that the coordinator's parts share. Pure data: nothing here decides. Used by one thread."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier_core.coordinator.actions import Action, SubmitJob, TellRequestFinished
from kvtier_core.coordinator.admission import Admission, KeyMemory
from kvtier_core.coordinator.answers import Lookup
from kvtier_core.coordinator.jobs import Job, JobKind, JobTable
from kvtier_core.coordinator.stats import Counters
from kvtier_core.coordinator.tier_record import TierRecord, TierSpec
from kvtier_core.errors import UnknownRequestError
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import Block, Ledger
from kvtier_core.values import MissReason, RequestInfo, TierJob

_TIER_LOAD = JobKind.TIER_LOAD

PLANNED = 0
"""Stands for the job of every promotion that has not left yet, as ``Block.writer`` and in ``State.waiting``."""


@dataclass(eq=False, slots=True)
class RequestState:
    """One request from ``new_request`` to the last block that a tier may still get of it."""

    info: RequestInfo
    load_tiers: Collection[str] | None
    store_tiers: Collection[str] | None
    last_lookup: float
    leases: set[OffloadKey] = field(default_factory=set)
    """The keys promised to it."""
    promised: list[OffloadKey] = field(default_factory=list)
    """All of them, and some that were promised earlier, in the order of the promises."""
    offered: set[OffloadKey] = field(default_factory=set)
    """Keys whose offer counts for admission already."""
    depth: int = 0
    """``Entry.depth`` of the next block that it offers. Depths of blocks that it reads are below zero."""
    read: int = 0
    """How many blocks it has loaded or given back, which sets the depth of the next."""
    used: set[OffloadKey] = field(default_factory=set)
    """Keys whose use by this request has been counted."""
    promoting: int = 0
    """Tier loads under way for this request."""
    wait_until: float | None = None
    """When lookups stop waiting for tiers to say what they hold; set while one is waiting."""
    is_nowhere: bool = False
    """Its last lookup ended at a key in no tier: what it computes from there on is in none either."""
    device_stores: int = 0
    """Device stores under way for this request."""
    waited: set[OffloadKey] = field(default_factory=set)
    """Keys that a promotion brought while this request waited for them."""
    not_loaded: dict[str, dict[OffloadKey, tuple[float, MissReason]]] = field(default_factory=dict)
    """By tier: keys that it waited for in vain, and until when it leaves them alone."""
    unsure: list[OffloadKey] = field(default_factory=list)
    """Keys under which the request is entered in ``State.waiting``, each once."""
    passed_over: set[OffloadKey] = field(default_factory=set)
    """Keys counted as passed over."""
    missed: dict[OffloadKey, MissReason] = field(default_factory=dict)
    """Keys whose miss has been counted, and why each missed last."""
    remembered: tuple[tuple[tuple[OffloadKey, ...], ...], Lookup] | None = None
    """The last lookup's keys and answer, while that is pending and nothing may have changed it."""
    cascaded: list[tuple[str, Sequence[OffloadKey]]] = field(default_factory=list)
    """Keys of each store job of this epoch, and its tier."""
    whole: dict[str, dict[OffloadKey, bool]] = field(default_factory=dict)
    """By tier that gets the whole request: each key offered, and whether the tier was or will be given it."""
    late: int = 0
    """Blocks that such tiers get later: those on their way into the pool, or waiting for a tier that is behind."""
    may_store: bool = True
    """False from a reset or a preemption until it begins again."""
    finished: bool = False

    def deepen(self, count: int) -> range:
        """The depths of the next *count* blocks that it offers, in prompt order: no two of them are equal."""
        first = self.depth
        self.depth += count
        return range(first, self.depth)

    def may_store_to(self, tier: str) -> bool:
        """Whether the request's filter lets its blocks go to *tier* (C27)."""
        return self.store_tiers is None or tier in self.store_tiers

    def may_load_from(self, tier: str) -> bool:
        """Whether the request's filter lets its blocks come from *tier* (C27)."""
        return self.load_tiers is None or tier in self.load_tiers


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """The coordinator's limits, in rows, seconds and threads. A limit with a default is no setting."""

    max_promotion_rows: int
    max_cascade_rows: int
    max_loading_rows: float = math.inf
    """Rows that loads from all tiers may hold, those that are overdue included."""
    store_threshold: int = 1
    """Offers from which on the pool stores a block."""
    lease_timeout_s: float = 30.0
    """A row stays reserved for a request that has stopped asking: longer than any scheduler leaves a request alone."""
    device_timeout_s: float = 60.0
    """A device store counts as lost: a copy of the whole pool takes seconds."""
    check_threads: int = 2
    """Threads that check the proofs of loaded rows: one checks faster than a disk reads."""
    max_events: int = 65_536
    """Changes of the pool's contents kept for a taker of events: some MiB."""
    max_tracker_size: int = 64_000
    """Keys whose offers are counted: some MiB."""
    break_even_margin: float = 1.25
    """How much longer than computing the same tokens a load may take, as a factor: computing keeps others waiting."""
    break_even_probe_s: float = 10.0
    """How often a tier that is passed over gets a load all the same, to see whether it still is slow."""
    load_again_after_s: float = 10.0
    """A request does not ask again so soon for what it waited for in vain, or it would wait for ever."""
    presence_ttl_s: float = 5.0
    """A tier's answer about a key is believed so long, on top of the longest ``lookup_timeout``."""
    max_remembered: int = 100_000
    """Answers about keys, and keys that could not be loaded, remembered of a tier: some 10 MiB."""
    max_unanswered: int = 1_000
    """Overdue lookups, and stores, that a tier may leave unanswered before it gets no more: each costs memory."""
    max_late_blocks: int = 10_000
    """Blocks of request-level requests that wait for a tier that is behind: each costs memory."""
    breaker_failures: int = 3
    """Failures in a row after which a tier is out of the path: one may be chance."""
    breaker_pause_s: float = 1.0
    """The first pause; each following one is twice as long."""
    breaker_max_pause_s: float = 60.0
    """The longest pause: a tier that works again is back within a minute."""


class State:
    """Everything the coordinator knows."""

    def __init__(self, ledger: Ledger, tiers: Sequence[TierSpec], limits: PoolLimits) -> None:
        self.ledger = ledger
        self.limits = limits
        self.slowest_lookup_s = max((spec.limits.lookup_timeout for spec in tiers), default=0.0)
        """An answer must outlive the wait for the slowest tier, or a request could wait for ever for all at once."""
        self.tiers = {
            spec.name: TierRecord(spec, ledger.num_rows, limits, self.slowest_lookup_s) for spec in tiers
        }
        self.requests: dict[str, RequestState] = {}
        self.jobs = JobTable()
        self.outbox: list[Action] = []
        self.counters = Counters(tiers={name: tier.counters for name, tier in self.tiers.items()})
        self.admission = Admission(
            limits.store_threshold, [spec.store_threshold for spec in tiers], limits.max_tracker_size
        )
        self.evicted = KeyMemory(ledger.num_rows)
        """Keys evicted from the pool lately: to tell misses apart."""
        self.no_lease_lapses_before = 0.0
        """The clock's time up to which ``leases.expire`` has nothing to do."""
        self.following: dict[Block, dict[RequestState, None]] = {}
        """Arriving blocks that tiers get as part of these requests, none of which stores the block itself."""
        self.planned: dict[RequestState, dict[str, list[Block]]] = {}
        """Promotions reserved in this step, by request and tier."""
        self.waiting: dict[int | OffloadKey, dict[RequestState, None]] = {}
        """Requests whose pending answer may change, by the number of the job that ends then, or the key that comes."""
        self.promoting_rows = 0
        self.quarantined_rows = 0
        self.cascade_rows = 0
        self.next_job = 1
        """The number that the next job will have."""

    def known(self, request_id: str) -> RequestState:
        """The request of this id. Raises ``UnknownRequestError`` when it never began, or is wholly over."""
        request = self.requests.get(request_id)
        if request is None:
            raise UnknownRequestError(
                f"request {request_id!r} was never begun, or is over: begin it with new_request"
            )
        return request

    def going_on(self, request_id: str) -> RequestState:
        """The request of this id. Raises ``UnknownRequestError`` when it never began, or was finished.

        One that was finished, and waits for its last store, would keep what it is promised for good.
        """
        request = self.known(request_id)
        if request.finished:
            raise UnknownRequestError(
                f"request {request_id!r} was finished: nothing can be asked or moved for it"
            )
        return request

    def start_job(
        self,
        kind: JobKind,
        request: RequestState,
        keys: Sequence[OffloadKey],
        blocks: Sequence[Block],
        deadline: float,
        tier: str = "",
    ) -> Job:
        """Enter a job into the table, under a number never used before."""
        # A tuple: a tier that changed its job's keys would change ours.
        job = Job(self.next_job, kind, tier, request, tuple(keys), blocks, deadline)
        self.next_job += 1
        self.jobs.add(job)
        if kind is _TIER_LOAD:
            for block in blocks:
                block.writer = job.id
        return job

    def submit(
        self,
        kind: JobKind,
        request: RequestState,
        tier: TierRecord,
        keys: Sequence[OffloadKey],
        blocks: Sequence[Block],
        now: float,
        *,
        is_prefix: bool = False,
        rows: Sequence[int] = (),
    ) -> Job:
        """Start a job of *tier*, and hand it over. *rows* are those of *blocks*, where they have been listed."""
        service = tier.service(kind)
        job = self.start_job(kind, request, keys, blocks, now + service.timeout_s, tier.name)
        job.is_prefix = is_prefix
        job.rows = rows
        service.breaker.submitted()
        tier.has_jobs_this_step = True
        self.outbox.append(SubmitJob(tier.name, kind, self.tier_job(job)))
        return job

    def end_job(self, job_id: int) -> Job:
        """A job is over: take it out of the table. Raises ``KeyError`` when there is none of this number."""
        job = self.jobs.end(job_id)
        if job.overdue and job.tier:
            self.tiers[job.tier].service(job.kind).unanswered -= 1
        return job

    def give_up(self, job: Job) -> None:
        """Nobody waits for *job* any more; where it is a tier's, its answer is owed all the same."""
        self.jobs.give_up(job)
        if job.tier:
            self.tiers[job.tier].service(job.kind).unanswered += 1

    def follow(self, request: RequestState, block: Block) -> None:
        """Tiers are to get *block*, which is arriving, as part of *request* once it is ready."""
        followers = self.following.setdefault(block, {})
        if request not in followers:
            followers[request] = None
            request.late += 1

    def plan_promotion(self, request: RequestState, block: Block) -> None:
        """*block* is to be loaded for *request*, from its source, when the step ends."""
        self.planned.setdefault(request, {}).setdefault(block.source, []).append(block)

    @property
    def promotion_room(self) -> float:
        """Rows that the pool's limits still allow for promotions (C21, C31)."""
        limits = self.limits
        loading = self.promoting_rows + self.quarantined_rows
        return min(limits.max_promotion_rows - self.promoting_rows, limits.max_loading_rows - loading)

    def forget_answer(self, request: RequestState) -> None:
        """The next lookup of *request* looks again."""
        request.remembered = None
        for key in request.unsure:
            waiting = self.waiting[key]
            del waiting[request]
            if not waiting:
                del self.waiting[key]
        request.unsure.clear()

    def wait(self, request: RequestState, events: Iterable[int | OffloadKey]) -> None:
        """The pending answer of *request* may change when one of these jobs ends, or one of these keys comes."""
        for event in events:
            self.waiting.setdefault(event, {})[request] = None

    def wake(self, job_id: int, keys: Collection[OffloadKey] = ()) -> Collection[RequestState]:
        """The job is over or given up, and *keys* may have come. Returns the requests that waited for the job."""
        waited = self.waiting.pop(job_id, {})
        for request in waited:
            self.forget_answer(request)
        for key in self.waiting.keys() & keys if keys and self.waiting else ():
            for request in list(self.waiting.get(key, ())):
                self.forget_answer(request)
        return waited

    @staticmethod
    def tier_job(job: Job) -> TierJob:
        """The part of *job* that its tier sees."""
        return TierJob(
            id=job.id,
            request=job.request.info,
            keys=job.keys,
            rows=job.rows or tuple([block.row for block in job.blocks]),
            deadline=job.deadline,
            is_prefix=job.is_prefix,
        )

    def detach(self, blocks: Iterable[Block]) -> None:
        """Part keys and rows, and end all promises of the keys.

        Cost: proportional to the blocks, and to the promised ones times the requests. Faults only.
        """
        promised = frozenset(self.ledger.detach(blocks))
        for request in self.requests.values() if promised else ():
            request.leases -= promised

    def note_evicted(self, keys: Sequence[OffloadKey]) -> None:
        """Remember keys whose blocks were evicted from the pool."""
        self.counters.evicted += len(keys)
        self.evicted.add(keys)

    def forget_if_over(self, request: RequestState) -> None:
        """Tell the tiers that *request* is over, once nothing of it can reach them any more (C26)."""
        if not request.finished or request.device_stores or request.late:
            return
        if self.requests.get(request.info.request_id) is not request:
            return
        del self.requests[request.info.request_id]
        for name in self.tiers:
            not_stored = tuple(key for key, given in request.whole.get(name, {}).items() if not given)
            self.outbox.append(TellRequestFinished(name, request.info, not_stored))
