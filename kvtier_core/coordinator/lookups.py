"""Lookups decide how much of a prefix can be loaded, what is asked of which tier, and what is promoted.

Three passes over the keys, no I/O: which keys the pool holds; what the tiers are known to hold of the rest (asking,
in one job a tier, what is unknown); then the longest prefix that fits into the pool together, in key order. Rows
are reserved only for that prefix, after the hits in it are leased, so that no promotion evicts a promised block.
"""

from collections.abc import Sequence

from kvtier_core.coordinator import leases
from kvtier_core.coordinator.actions import AskTier
from kvtier_core.coordinator.state import JobKind, Lookup, RequestState, State, TierState
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import Block, BlockState
from kvtier_core.values import LookupState, MissReason

_TELLING = (MissReason.INTEGRITY, MissReason.TIER_FAILED, MissReason.TIER_SLOW)
"""Reasons worth more than "never stored", most telling first."""

_Verdict = str | MissReason | None
"""The tier to load from, why there is none, or ``None`` while a tier has not said."""


class _Walk:
    """One pass over the prefix: the answers so far and what they would take of the pool."""

    def __init__(self, room: int, promotions: int) -> None:
        self.states: list[LookupState] = []
        self.reason: MissReason | None = None
        self.hold: list[Block] = []
        self.promote: dict[OffloadKey, str] = {}
        self.room = room
        self.promotions = promotions

    def miss(self, reason: MissReason) -> bool:
        self.states.append(LookupState.MISS)
        self.reason = reason
        return False

    def retry(self) -> bool:
        self.states.append(LookupState.RETRY)
        return False

    def take(self, block: Block, *, idle: bool) -> bool:
        if idle:
            if not self.room:
                return self.miss(MissReason.PRIMARY_FULL)
            self.room -= 1
        self.hold.append(block)
        ready = block.state is BlockState.READY
        self.states.append(LookupState.HIT if ready else LookupState.HIT_PENDING)
        return True

    def want(self, key: OffloadKey, tier: str, *, waiting: bool) -> bool:
        if key not in self.promote:
            if self.room and not self.promotions and (waiting or self.promote):
                return self.retry()
            if not self.room or not self.promotions:
                return self.miss(MissReason.PRIMARY_FULL)
            self.room -= 1
            self.promotions -= 1
            self.promote[key] = tier
        self.states.append(LookupState.HIT_PENDING)
        return True


class Lookups:
    """Answers lookups on the shared state."""

    def __init__(self, state: State) -> None:
        self._state = state

    def lookup(self, request: RequestState, keys: Sequence[OffloadKey], now: float) -> Lookup:
        """Answer for *keys*, in prefix order. Cost: proportional to the keys."""
        state = self._state
        request.last_lookup = now
        blocks = [state.ledger.find(key) for key in keys]
        absent = [key for key, block in zip(keys, blocks, strict=True) if block is None]
        verdicts = dict(zip(absent, self._verdicts(request, absent, now), strict=True))
        self._bound_waiting(request, verdicts, now)
        walk = self._walk(request, keys, blocks, verdicts)
        self._commit(request, walk)
        if walk.reason is not None:
            self._count_miss(request, keys[len(walk.states) - 1], walk.reason)
        found = Lookup(tuple(walk.states), walk.reason)
        if found.is_settled:
            request.wait_until = None
        return found

    # -- what the tiers hold

    def _verdicts(self, request: RequestState, keys: Sequence[OffloadKey], now: float) -> list[_Verdict]:
        verdicts: list[_Verdict] = [MissReason.NEVER_STORED] * len(keys)
        if not keys:
            return verdicts
        decided = [False] * len(keys)
        for tier in self._state.tiers.values():
            if not request.may_load_from(tier.name):
                continue
            for index, answer in enumerate(self._ask(request, tier, keys, now)):
                if decided[index]:
                    continue
                if isinstance(answer, MissReason):
                    verdicts[index] = self._more_telling(verdicts[index], answer)
                else:
                    decided[index] = True
                    verdicts[index] = answer
        return [
            MissReason.EVICTED
            if verdict is MissReason.NEVER_STORED and key in self._state.evicted
            else verdict
            for key, verdict in zip(keys, verdicts, strict=True)
        ]

    def _bound_waiting(self, request: RequestState, verdicts: dict[OffloadKey, _Verdict], now: float) -> None:
        """No request waits longer than the slowest tier may take, however often answers lapse and are asked again."""
        unknown = [key for key, verdict in verdicts.items() if verdict is None]
        if not unknown:
            request.wait_until = None
            return
        if request.wait_until is None:
            request.wait_until = now + self._state.slowest_lookup_s
        if now >= request.wait_until:
            verdicts.update(dict.fromkeys(unknown, MissReason.TIER_SLOW))

    @staticmethod
    def _more_telling(one: _Verdict, other: MissReason) -> _Verdict:
        return next((reason for reason in _TELLING if reason in (one, other)), other)

    def _ask(
        self, request: RequestState, tier: TierState, keys: Sequence[OffloadKey], now: float
    ) -> list[_Verdict]:
        """What *tier* is known to hold; unknown keys are asked of it, all in one job."""
        answers = tier.presence.classify(keys, now)
        unknown = [
            key
            for key, answer in zip(keys, answers, strict=True)
            if answer is None and not tier.presence.is_asked(key)
        ]
        refused = not tier.may_ask(now)
        if unknown and not refused:
            job = self._state.start_job(
                JobKind.LOOKUP, request, unknown, (), now + tier.limits.lookup_timeout, tier.name
            )
            tier.presence.ask(unknown, job.id)
            tier.lookup_breaker.submitted()
            self._state.outbox.append(AskTier(self._state.plan(job)))
        may_promote = tier.may_promote(now)
        verdicts: list[_Verdict] = []
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, MissReason):
                verdicts.append(answer)
            elif answer:
                verdicts.append(tier.name if may_promote else MissReason.TIER_FAILED)
            else:
                verdicts.append(None if tier.presence.is_asked(key) else MissReason.TIER_FAILED)
        return verdicts

    # -- what fits

    def _walk(
        self,
        request: RequestState,
        keys: Sequence[OffloadKey],
        blocks: Sequence[Block | None],
        verdicts: dict[OffloadKey, _Verdict],
    ) -> _Walk:
        state = self._state
        walk = _Walk(state.ledger.room, state.limits.max_promotion_rows - state.promoting_rows)
        waiting = bool(request.promoting or request.planned)
        for key, block in zip(keys, blocks, strict=True):
            if block is not None:
                goes_on = walk.take(block, idle=state.ledger.is_idle(block))
            else:
                verdict = verdicts[key]
                if verdict is None:
                    goes_on = walk.retry()
                elif isinstance(verdict, MissReason):
                    goes_on = walk.miss(verdict)
                else:
                    goes_on = walk.want(key, verdict, waiting=waiting)
            if not goes_on:
                break
        return walk

    def _commit(self, request: RequestState, walk: _Walk) -> None:
        state = self._state
        for block in walk.hold:
            leases.grant(state, request, block)
            if block.state is BlockState.ARRIVING and block.source:
                request.waited.add(block.key)
        if not walk.promote:
            return
        reserved = state.ledger.reserve(list(walk.promote))
        assert reserved is not None, "the walk promised more than the pool has room for"
        new, evicted = reserved
        state.note_evicted(evicted)
        state.promoting_rows += len(new)
        for block in new:
            block.source = walk.promote[block.key]
            leases.grant(state, request, block)
            request.waited.add(block.key)
            request.planned.setdefault(block.source, []).append(block)

    def _count_miss(self, request: RequestState, key: OffloadKey, reason: MissReason) -> None:
        if key not in request.missed:
            request.missed.add(key)
            self._state.counters.misses[reason] += 1
