"""Stores decide which rows new blocks get, and which tiers a stored block goes on to (the cascade).

A tier that is behind, out of the path or at its limit is left out and counted. Once idle it gets the blocks that the
pool still holds (C28). A cascade past its deadline is unpinned. If the tier reads the row later, the proof gives the
changed bytes away.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, takewhile

from kvtier_core.coordinator import leases
from kvtier_core.coordinator.actions import (
    CancelJobs,
    SealRows,
    TellNewRequest,
    TellRequestFinished,
)
from kvtier_core.coordinator.jobs import Job, JobKind
from kvtier_core.coordinator.request_state import RequestState
from kvtier_core.coordinator.state import State
from kvtier_core.coordinator.tier_record import TierRecord
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import ARRIVING, DETACHED, READY, Block
from kvtier_core.values import MissReason, PreparedTransfer, RequestInfo

NOTHING_TO_DO = PreparedTransfer(0, (), ())
"""A transfer of no block; it has no job and is not to be completed."""

_MAX_MADE_UP = 1024
"""Keys that a tick looks at for one tier, of what that missed: bounds the time on the engine's thread."""


def _some(depths: Sequence[int], keys: Sequence[OffloadKey], some: Sequence[OffloadKey]) -> Sequence[int]:
    """The depths of *some* of *keys*, which come in the order of *depths*."""
    if len(some) == len(keys):
        return depths
    of = dict(zip(keys, depths, strict=True))
    return [of[key] for key in some]


def _take(missed: OrderedDict[OffloadKey, RequestInfo], n: int) -> tuple[RequestInfo, list[OffloadKey]]:
    """Take the oldest key, and those after it that the same request offered, at most *n* in all."""
    request = next(iter(missed.values()))
    keys = list(islice(takewhile(lambda key: missed[key] is request, missed), n))
    for key in keys:
        del missed[key]
    return request, keys


class Cascades:
    """Device stores and tier stores on the shared state."""

    def __init__(self, state: State) -> None:
        self._state = state

    def prepare(
        self, request: RequestState, keys: Sequence[OffloadKey], now: float, *, admit_all: bool = False
    ) -> PreparedTransfer | None:
        """Rows for those of *keys* that the pool does not hold and admits, in order; ``None`` when there is no room.

        With *admit_all* the pool also takes what was offered too seldom.
        """
        state = self._state
        if len(set(keys)) < len(keys):  # a block named twice would have two places in the order of eviction
            keys = list(dict.fromkeys(keys))
        depths = request.deepen(len(keys))
        counted = state.admission.offer(keys, request.offered)
        absent = list(keys)
        keys_held: dict[OffloadKey, None] = {}
        if state.ledger.holds_any(keys):
            held = [block for block in state.ledger.find_all(keys) if block is not None]
            leases.use(state, request, held, _some(depths, keys, [block.key for block in held]))
            if counted:
                self._cascade_often_offered(request, held, counted, now)
            if any(block.withheld for block in held):
                self._offer_withheld(request, held, now)
            keys_held = dict.fromkeys([block.key for block in held])
            absent = [key for key in absent if key not in keys_held]
        new = absent if admit_all else state.admission.admitted_to_pool(absent)
        state.counters.below_threshold += len(absent) - len(new)
        if not new:
            return NOTHING_TO_DO
        if state.holds:
            state.holds.make_room(
                len(new) + sum(map(state.ledger.is_idle, state.ledger.blocks_of(keys_held)))
            )
        reserved = state.ledger.reserve(
            new, keys_held, state.next_job, chain=request.info.chain, depths=_some(depths, keys, new)
        )
        if reserved is None:
            return None
        state.note_evicted(reserved.evicted)
        deadline = now + state.limits.device_timeout_s
        job = state.start_job(JobKind.DEVICE_STORE, request, new, reserved.blocks, deadline)
        job.rows = reserved.rows
        if request.store_tiers is not None:
            withheld = frozenset(name for name in state.tiers if not request.may_store_to(name))
            for block in reserved.blocks:
                block.withheld = withheld
        request.device_stores += 1
        return PreparedTransfer(job.id, new, reserved.rows, reserved.evicted)

    def complete(self, job: Job, *, success: bool, now: float) -> None:
        """A device store ended: its blocks become visible and go on to the tiers, or their rows are free again."""
        state = self._state
        job.request.device_stores -= 1
        if job.overdue or not success:
            self.expire_device_store(job)
            state.ledger.unpin(job.blocks)
            return
        state.counters.device_stored += len(job.blocks)
        tiers = [tier for tier in state.tiers.values() if self._may_cascade(job.request, tier)]
        if tiers and all(self._takes_all(tier, job, now) for tier in tiers):
            self._cascade_all(job, tiers, now)
            return
        state.ledger.make_ready(job.blocks)
        self._cascade(job.request, [(tier, job.blocks) for tier in tiers], now)

    def _cascade_often_offered(
        self, request: RequestState, blocks: Sequence[Block], counted: Sequence[OffloadKey], now: float
    ) -> None:
        """Give *blocks*, which the pool holds, to the tiers whose threshold this offer has reached."""
        fresh = frozenset(counted)
        ready = [block for block in blocks if block.state is READY and block.key in fresh]
        tiers = [
            tier
            for tier in self._state.tiers.values()
            if tier.store_threshold > 1 and self._may_cascade(request, tier)
        ]
        if ready and tiers:
            self._cascade(request, [(tier, ready) for tier in tiers], now)

    def _offer_withheld(self, request: RequestState, held: Sequence[Block], now: float) -> None:
        """*request* offers what another one stored: its own filter says which tiers get it, not the other's."""
        for block in held:
            tiers = self._state.tiers.values()
            if block.state is ARRIVING and any(self._lacks(tier, request, block) for tier in tiers):
                self._state.follow(request, block)
        self.give_withheld(request, [block for block in held if block.state is READY], now)

    def give_withheld(self, request: RequestState, blocks: Sequence[Block], now: float) -> None:
        """Give *blocks*, which *request* has offered, to the tiers that another request's filter kept them from."""
        lacking = [
            (tier, [block for block in blocks if self._lacks(tier, request, block)])
            for tier in self._state.tiers.values()
        ]
        self._cascade(request, lacking, now)

    def _lacks(self, tier: TierRecord, request: RequestState, block: Block) -> bool:
        return tier.name in block.withheld and self._may_cascade(request, tier)

    def expire_device_store(self, job: Job) -> None:
        """Let the keys of a device store go, while its rows wait for the worker: it is overdue, or a reset came."""
        self._state.detach(block for block in job.blocks if block.state is not DETACHED)

    # -- onwards to the tiers

    @staticmethod
    def _may_cascade(request: RequestState, tier: TierRecord) -> bool:
        """Whether what *request* stores goes on to *tier*; one that gets whole requests is served elsewhere."""
        return request.may_store_to(tier.name) and tier.name not in request.whole

    def _takes_all(self, tier: TierRecord, job: Job, now: float) -> bool:
        """Whether *tier* is to be given every block of a device store."""
        count = len(job.blocks)
        return (
            tier.store_threshold <= 1
            and not tier.late
            and tier.may_store(now)
            and count <= tier.max_cascade_rows - tier.cascade_rows
            and count <= self._state.limits.max_cascade_rows - self._state.cascade_rows
            and (job.request.is_nowhere or not tier.presence.holds_any(job.keys))
        )

    def _cascade_all(self, stored: Job, tiers: Sequence[TierRecord], now: float) -> None:
        """The usual cascade: every tier gets every block. Readers' pins replace the writer's at once."""
        state = self._state
        blocks, request = stored.blocks, stored.request
        state.ledger.make_ready(blocks, pins=1 + len(tiers))
        for block in blocks:
            block.cascades = len(tiers)
            block.is_sealed = True
        state.cascade_rows += len(blocks)
        self._seal(request, stored.keys, blocks, stored.rows)
        for tier in tiers:
            tier.cascade_rows += len(blocks)
            self._submit_store(request, tier, stored.keys, blocks, now, stored.rows)

    def _cascade(
        self, request: RequestState, wanted: Iterable[tuple[TierRecord, Sequence[Block]]], now: float
    ) -> None:
        """Give each tier, as part of *request*, those of its blocks that it takes."""
        chosen: dict[str, Sequence[Block]] = {}
        for tier, blocks in wanted:
            for block in blocks:
                if block.withheld:
                    block.withheld -= {tier.name}
            admitted = self._admit(request, tier, blocks, now)
            if admitted:
                self.pin(tier, admitted)
                chosen[tier.name] = admitted
        if chosen:
            self.store(request, chosen, now)

    def store(self, request: RequestState, chosen: Mapping[str, Sequence[Block]], now: float) -> None:
        """Hand each tier of *chosen* its blocks, which have been pinned for it, as one job."""
        unsealed = [b for b in dict.fromkeys(chain.from_iterable(chosen.values())) if not b.is_sealed]
        if unsealed:
            # Sealing writes into the rows: it holds pins of its own until it is over, whatever the stores' deadlines.
            self._state.ledger.pin(unsealed)
            for block in unsealed:
                block.is_sealed = True
            self._seal(request, [block.key for block in unsealed], unsealed)
        for name, blocks in chosen.items():
            self._submit_store(request, self._state.tiers[name], [block.key for block in blocks], blocks, now)

    def _submit_store(
        self,
        request: RequestState,
        tier: TierRecord,
        keys: Sequence[OffloadKey],
        blocks: Sequence[Block],
        now: float,
        rows: Sequence[int] = (),
    ) -> None:
        job = self._state.submit(JobKind.TIER_STORE, request, tier, keys, blocks, now, rows=rows)
        request.cascaded.append((tier.name, job.keys))

    def _seal(
        self,
        request: RequestState,
        keys: Sequence[OffloadKey],
        blocks: Sequence[Block],
        rows: Sequence[int] = (),
    ) -> None:
        """Have the proofs of *blocks*, each pinned for it, written before their stores leave."""
        job = self._state.start_job(JobKind.SEAL, request, keys, blocks, math.inf)
        job.rows = rows
        self._state.outbox.append(SealRows(self._state.tier_job(job)))

    def _admit(
        self, request: RequestState, tier: TierRecord, blocks: Sequence[Block], now: float
    ) -> Sequence[Block]:
        """The blocks that *tier* lacks and its limits allow; the others that it lacks are counted."""
        keys = [block.key for block in blocks]
        lacking = blocks
        if tier.presence.holds_any(keys):
            present = tier.presence.classify(keys, now)
            lacking = [block for block, there in zip(blocks, present, strict=True) if there is not True]
        wanted, threshold = lacking, tier.store_threshold
        if threshold > 1:
            wanted = [block for block in lacking if self._state.admission.is_admitted(block.key, threshold)]
        tier.counters.below_threshold += len(lacking) - len(wanted)
        if tier.late or not tier.may_store(now):  # what waits already goes first (C25)
            self._miss(request, tier, wanted)
            return []
        room = tier.max_cascade_rows - tier.cascade_rows
        total = self._state.limits.max_cascade_rows - self._state.cascade_rows
        if len(wanted) <= min(room, total):
            return wanted
        chosen: list[Block] = []
        for block in wanted:
            if len(chosen) == room or (not block.cascades and not total):
                break
            total -= not block.cascades
            chosen.append(block)
        self._miss(request, tier, wanted[len(chosen) :])
        return chosen

    def _miss(self, request: RequestState, tier: TierRecord, blocks: Sequence[Block]) -> None:
        """*tier* does not get *blocks* now."""
        tier.counters.dropped += len(blocks)
        tier.missed.update(dict.fromkeys([block.key for block in blocks], request.info))
        while len(tier.missed) > self._state.ledger.num_rows:
            tier.missed.popitem(last=False)

    def make_up(self, now: float) -> None:
        """Give every idle tier what it missed."""
        for tier in self._state.tiers.values():
            if not tier.missed or tier.cascade_rows or tier.late:
                continue
            looks = _MAX_MADE_UP
            room = min(tier.max_cascade_rows, self._state.limits.max_cascade_rows - self._state.cascade_rows)
            while room > 0 and looks > 0 and tier.missed and tier.may_store(now):
                request, keys = _take(tier.missed, min(room, looks))
                looks -= len(keys)
                room -= self._make_up(tier, request, keys, now)

    def _make_up(self, tier: TierRecord, missed: RequestInfo, keys: Sequence[OffloadKey], now: float) -> int:
        """Give *tier* those of *keys* that the pool still holds and it lacks. Returns how many.

        Their request may be over: they come as a request of their own, which is over at once.
        """
        blocks = [
            block for block in self._state.ledger.find_all(keys) if block is not None and block.state is READY
        ]
        present = tier.presence.classify([block.key for block in blocks], now)
        lacking = [block for block, there in zip(blocks, present, strict=True) if there is not True]
        if not lacking:
            return 0
        info = replace(missed, request_id=f"{missed.request_id}~{self._state.next_job}")
        self._state.outbox.append(TellNewRequest(tier.name, info))
        self.pin(tier, lacking)
        self.store(RequestState(info, None, None, now), {tier.name: lacking}, now)
        self._state.outbox.append(TellRequestFinished(tier.name, info))
        tier.counters.made_up += len(lacking)
        return len(lacking)

    def has_room(self, tier: TierRecord, block: Block) -> bool:
        """Whether *block* may be pinned for *tier* within the limits (C28)."""
        limits = self._state.limits
        return tier.cascade_rows < tier.max_cascade_rows and (
            block.cascades > 0 or self._state.cascade_rows < limits.max_cascade_rows
        )

    def pin(self, tier: TierRecord, blocks: Sequence[Block]) -> None:
        """Pin *blocks* for a store to *tier*."""
        self._state.ledger.pin(blocks)
        tier.cascade_rows += len(blocks)
        first = 0
        for block in blocks:
            if not block.cascades:
                first += 1
            block.cascades += 1
        self._state.cascade_rows += first

    def _unpin(self, job: Job) -> None:
        self._state.tiers[job.tier].cascade_rows -= len(job.blocks)
        for block in job.blocks:
            block.cascades -= 1
            if not block.cascades:
                self._state.cascade_rows -= 1
        self._state.ledger.unpin(job.blocks)

    def finish(
        self, job: Job, bad: Mapping[OffloadKey, MissReason], held: Collection[OffloadKey], now: float
    ) -> None:
        """The tier's result of a store. Keys that are *bad* without a fault are ones that it declined.

        Those that it *held* already were not written, and count for nothing.
        """
        if job.overdue:
            return
        self._unpin(job)
        tier = self._state.tiers[job.tier]
        stored = [key for key in job.keys if key not in bad]
        declined = sum(reason is MissReason.NOT_STORED for reason in bad.values())
        tier.counters.stored += len(set(stored).difference(held)) if held else len(stored)
        tier.counters.declined += declined
        tier.counters.store_failed += len(bad) - declined
        if not job.stale:
            tier.presence.stored(stored, now)

    def expire(self, job: Job) -> None:
        """The deadline of a tier store passed (it is marked overdue)."""
        self._unpin(job)
        self._state.outbox.append(CancelJobs(job.tier, [job.id]))
