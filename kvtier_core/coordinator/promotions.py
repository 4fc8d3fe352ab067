"""Promotions: reserved rows become load jobs at the end of a step, and ready blocks when their job ends.

When a load passes its deadline, the keys that have come count and the others are lost. Its rows hold nothing else until
the tier answers, because the tier may still write them (quarantine).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvtier_core.coordinator.actions import CancelJobs
from kvtier_core.coordinator.jobs import Job, JobKind
from kvtier_core.coordinator.request_state import RequestState
from kvtier_core.coordinator.state import State
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import ARRIVING, READY, Block
from kvtier_core.values import MissReason


class Promotions:
    """Tier loads on the shared state."""

    def __init__(self, state: State) -> None:
        self._state = state

    def submit_planned(self, now: float) -> None:
        """Turn the step's reservations into one load job per (tier, request)."""
        state = self._state
        if not state.planned:
            return
        planned, state.planned = state.planned, {}
        for request, by_tier in planned.items():
            for name, blocks in by_tier.items():
                keys = [block.key for block in blocks]
                tier = state.tiers[name]
                # A hiccup is no loss: a load is waited for at least as long as a lookup.
                patience_s = max(tier.limits.lookup_timeout, request.patience.pop(name))
                state.submit(JobKind.TIER_LOAD, request, tier, keys, blocks, now, patience_s=patience_s)
                request.promoting += 1
        state.departure -= 1
        state.changes += 1

    def hand_over_planned(self, request: RequestState) -> list[Block]:
        """*request* ends before its reservations left: others that wait for a block take it over.

        The rest is freed, and returned. Cost: proportional to the blocks; for those that were promised to others as
        well, to the requests that wait for planned promotions. One look at each request.
        """
        state = self._state
        dropped: list[Block] = []
        planned = state.planned.pop(request, {})
        departure = state.departure
        waiting = [
            other
            for other in (state.requests.values() if planned else ())
            if other is not request and other.pending is not None and departure in other.pending.events
        ]
        for name, blocks in planned.items():
            patience_s = request.patience.pop(name)
            for block in blocks:
                heir = self._heir(block, name, request, waiting)
                if heir is not None:
                    heir.be_patient(name, patience_s)
                    state.plan_promotion(heir, block)
                else:
                    self._release(name, 1)
                    dropped.append(block)
        if dropped:
            self._drop(dropped)
            for other in waiting:
                other.pending = None
        return dropped

    def _heir(
        self, block: Block, tier: str, leaver: RequestState, waiting: Iterable[RequestState]
    ) -> RequestState | None:
        if self._state.ledger.num_leases(block.key) == (block.key in leaver.leases):
            return None
        for other in waiting:
            if other.may_load_from(tier) and block.key in other.leases:
                return other
        return None

    def _release(self, tier: str, rows: int) -> None:
        """*rows* rows are no longer reserved for loads from *tier*."""
        self._state.promoting_rows -= rows
        self._state.tiers[tier].loading_rows -= rows

    def _drop(self, blocks: Sequence[Block]) -> None:
        self._state.detach(blocks)
        self._state.ledger.unpin(blocks)

    def finish(self, job: Job, lost: dict[OffloadKey, MissReason], now: float) -> None:
        """The tier's result: every key of *job* outside *lost* is in its row, checked."""
        state = self._state
        tier = state.tiers[job.tier]
        if job.overdue:
            tier.quarantined_rows -= len(job.blocks)
            state.quarantined_rows -= len(job.blocks)
            taken_back = [block for block in job.blocks if block.state is READY and block.key in lost]
            for block in taken_back:
                tier.presence.lost(block.key, lost[block.key], now)
            state.detach(taken_back)
            state.ledger.unpin(job.blocks)
            return
        job.request.promoting -= 1
        self._release(job.tier, len(job.blocks))
        if MissReason.TIER_FAILED not in lost.values():
            tier.loads_in_time = True
        self._make_ready(job, [block for block in job.blocks if block.key not in lost])
        for key in job.keys:
            if key in lost:
                tier.presence.lost(key, lost[key], now)
        self._drop([block for block in job.blocks if block.key in lost])
        self.note_lost(job, lost, now)

    def _make_ready(self, job: Job, blocks: Sequence[Block], pins: int = 0) -> None:
        """*blocks* of *job* have come. They keep *pins* pins."""
        self._state.ledger.make_ready(blocks, pins)
        self._state.tiers[job.tier].counters.loaded += len(blocks)
        for block in blocks:
            block.is_sealed = True

    def note_lost(self, job: Job, lost: Mapping[OffloadKey, MissReason], now: float) -> None:
        """No request that waited for *job* waits for its *lost* keys again soon (K6). Cost: a look at each request."""
        miss_ttl = self._state.tiers[job.tier].limits.miss_ttl
        until = now + max(miss_ttl, self._state.limits.load_again_after_s)
        noted = {key: (until, reason) for key, reason in lost.items()}
        for request in self._state.requests.values() if noted else ():
            if request is job.request or request.waits_for(job.id):
                request.not_loaded.setdefault(job.tier, {}).update(noted)

    def expire(self, job: Job, arrived: Collection[OffloadKey], now: float) -> None:
        """*job* is overdue: its requests go on with what has *arrived* of it."""
        tier = self._state.tiers[job.tier]
        tier.loads_in_time = False
        # The job's own pin stays: until the tier's result nothing else may come into these rows.
        self._make_ready(job, [block for block in job.blocks if block.key in arrived], pins=1)
        lost = dict.fromkeys([key for key in job.keys if key not in arrived], MissReason.TIER_SLOW)
        self.quarantine(job)
        for key, reason in lost.items():
            tier.presence.lost(key, reason, now)
        self.note_lost(job, lost, now)
        self._state.outbox.append(CancelJobs(job.tier, [job.id]))

    def quarantine(self, job: Job) -> None:
        """Part the keys that have not come from the rows of a load, all of which it keeps until its result."""
        state = self._state
        job.request.promoting -= 1
        self._release(job.tier, len(job.blocks))
        state.tiers[job.tier].quarantined_rows += len(job.blocks)
        state.quarantined_rows += len(job.blocks)
        state.detach(block for block in job.blocks if block.state is ARRIVING)

    def drop_planned(self) -> None:
        """A reset, after the end of all promises: reservations that have not left are taken back."""
        for request in list(self._state.planned):
            self.hand_over_planned(request)
