"""The state that the coordinator's parts share. Pure data: nothing here decides. Used by one thread."""

import math
from collections.abc import Iterable, Sequence

from kvtier_core.coordinator.actions import Action, SubmitJob, TellRequestFinished
from kvtier_core.coordinator.admission import Admission, KeyMemory
from kvtier_core.coordinator.holds import Holds
from kvtier_core.coordinator.jobs import Job, JobKind, JobTable
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.coordinator.request_state import RequestState
from kvtier_core.coordinator.stats import Counters
from kvtier_core.coordinator.tier_record import TierRecord, TierSpec
from kvtier_core.errors import UnknownRequestError
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import Block, Ledger
from kvtier_core.values import TierJob

_TIER_LOAD = JobKind.TIER_LOAD


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
        self.holds = Holds(ledger, limits)
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
        self.departure = -1
        """The number of their next departure, at the end of a step. It is below zero, unlike a job's."""
        self.promoting_rows = 0
        self.quarantined_rows = 0
        self.cascade_rows = 0
        self.changes = 0
        """How often a job began, ended or was given up, or promotions were planned, or left."""
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
        self.changes += 1
        self.jobs.add(job)
        if kind is _TIER_LOAD:
            for block in blocks:
                block.writer = job.id
        return job

    def submit(  # noqa: PLR0913 - the last three by name
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
        patience_s: float = math.inf,
    ) -> Job:
        """Start a job of *tier*, and hand it over. *rows* are those of *blocks*, where they have been listed.

        It has as long as its kind may take, and no longer than *patience_s*.
        """
        service = tier.service(kind)
        deadline = now + min(service.timeout_s, patience_s)
        job = self.start_job(kind, request, keys, blocks, deadline, tier.name)
        job.begun = now
        job.is_prefix = is_prefix
        job.rows = rows
        service.breaker.submitted()
        tier.has_jobs_this_step = True
        self.outbox.append(SubmitJob(tier.name, kind, self.tier_job(job)))
        return job

    def end_job(self, job_id: int) -> Job:
        """A job is over: take it out of the table. Raises ``KeyError`` when there is none of this number."""
        job = self.jobs.end(job_id)
        self.changes += 1
        if job.overdue and job.tier:
            self.tiers[job.tier].service(job.kind).unanswered -= 1
        return job

    def give_up(self, job: Job) -> None:
        """Nobody waits for *job* any more; where it is a tier's, its answer is owed all the same."""
        self.jobs.give_up(job)
        self.changes += 1
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
        self.changes += 1
        self.planned.setdefault(request, {}).setdefault(block.source, []).append(block)

    @property
    def promotion_room(self) -> float:
        """Rows that the pool's limits still allow for promotions (C21, C31)."""
        limits = self.limits
        loading = self.promoting_rows + self.quarantined_rows
        return min(limits.max_promotion_rows - self.promoting_rows, limits.max_loading_rows - loading)

    def is_pending(self, request: RequestState) -> bool:
        """Whether *request* has an answer that is pending, and nothing has happened that it waits for.

        Cost: two comparisons while nothing has happened at all; else a look at each event, and at each unsure key.
        """
        pending = request.pending
        if pending is None or len(request.leases) < pending.promised:
            return False
        if pending.seen == self.changes:
            return True
        for event in pending.events:
            job = self.jobs.get(event)
            if (event != self.departure) if job is None else job.overdue:
                return False
        if self.ledger.holds_any(pending.unsure):
            return False
        pending.seen = self.changes
        return True

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
        self.holds.lost(promised)

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
