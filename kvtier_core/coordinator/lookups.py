"""Lookups decide how much of a prompt can be loaded, what is asked of which tier, and what is promoted.

One call looks at all keys of all groups, without I/O. It finds the blocks that the pool holds, then what tiers are
known to hold of the rest (what is unknown is asked, in one job a tier), then the longest end point whose blocks fit
into the pool together. Rows are reserved for that end point alone, in key order. Its hits are leased before, so that
no promotion evicts a promised block. A pending answer is remembered until something that it waits for has happened.
"""

from collections.abc import Sequence
from operator import itemgetter

from kvtier_core.coordinator import leases
from kvtier_core.coordinator.break_even import BreakEven
from kvtier_core.coordinator.endpoints import (
    GroupCosts,
    GroupShape,
    find_end,
    find_ends,
    is_prefix,
    last_candidate,
    unit_of,
)
from kvtier_core.coordinator.group_lookup import GroupLookup, Verdict
from kvtier_core.coordinator.request_state import Pending, RequestState
from kvtier_core.coordinator.state import State
from kvtier_core.coordinator.tier_answers import TierAnswers
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import ARRIVING, READY, Block
from kvtier_core.values import Lookup, LookupState, MissReason

_NOWHERE = (MissReason.NOT_STORED, MissReason.EVICTED, MissReason.BELOW_THRESHOLD)
"""Reasons that say of a key that no tier holds it."""

_Keys = Sequence[OffloadKey]


class _Plan:
    """The outcome of one lookup: the end point, what to hold and to promote for it, and what it waits for."""

    __slots__ = ("end", "hold", "promote", "reason", "retry", "unknown")

    def __init__(self, end: int) -> None:
        self.end = end
        self.hold: list[Block] = []
        self.promote: dict[OffloadKey, str] = {}
        self.unknown: list[OffloadKey] = []
        self.retry: dict[OffloadKey, None] = {}
        """Keys that must be looked up again before more can be said."""
        self.reason: MissReason | None = None


class Lookups:
    """Answers lookups on the shared state."""

    def __init__(self, state: State, shapes: Sequence[GroupShape]) -> None:
        self._state = state
        self._shapes = shapes
        self._is_prefix = is_prefix(shapes)
        self._tiers = TierAnswers(state)
        self.break_even = BreakEven(state)

    def lookup(self, request: RequestState, keys: Sequence[_Keys], now: float) -> Lookup:
        """``Coordinator.lookup``. Cost: proportional to the keys; constant while the answer is pending."""
        request.last_lookup = now
        pending = request.pending
        if pending is not None:
            is_early = request.wait_until is None or now < request.wait_until
            if is_early and pending.asked == keys and self._state.is_pending(request):
                return pending.answer
            request.pending = None
        found = self._at_once(request, keys[0], now) if self._is_prefix else None
        if found is None:
            plan = self._plan(request, keys, now)
            found = self._answer(keys, plan)
            if not found.is_settled and (events := self._events(plan)):
                asked, promised = tuple(map(tuple, keys)), len(request.leases)
                request.pending = Pending(asked, found, events, promised, plan.unknown, self._state.changes)
            elif found.is_settled and not self._is_prefix:
                leases.keep_only(self._state, request, [block.key for block in plan.hold])
        if found.is_settled:
            request.wait_until = None
        request.is_nowhere = request.load_tiers is None and found.reason in _NOWHERE
        return found

    def _at_once(self, request: RequestState, keys: _Keys, now: float) -> Lookup | None:
        """The answer for a lone prefix, if every key is ready or the first that is not is known to be nowhere.

        Otherwise ``None``. No block is looked at.
        """
        ledger = self._state.ledger
        ready = ledger.ready_prefix(keys)
        state, reason = LookupState.HIT, None
        if len(ready) < len(keys):
            key = keys[len(ready)]
            if ledger.find(key) is not None:
                return None
            reason = self._tiers.sure_miss(request, key, now)
            if reason is None:
                return None
            state, reason = LookupState.MISS, self._count_miss(request, key, reason)
        leases.grant(self._state, request, ready)
        tokens = len(ready) * self._shapes[0].tokens_per_block
        return Lookup(tokens, tokens, state, reason)

    def _answer(self, keys: Sequence[_Keys], plan: _Plan) -> Lookup:
        if plan.retry:
            state = LookupState.RETRY
        elif plan.promote or any(block.state is not READY for block in plan.hold):
            state = LookupState.HIT_PENDING
        else:
            state = LookupState.HIT if plan.reason is None else LookupState.MISS
            return Lookup(plan.end, plan.end, state, plan.reason)
        return Lookup(plan.end, self.loadable(keys), state, plan.reason)

    def loadable(self, keys: Sequence[_Keys]) -> int:
        """The longest end point that can be loaded at once."""
        return find_end(self._costs_at_once(keys), room=0)

    def ends(self, request: RequestState, keys: Sequence[_Keys], now: float, *, at_once: bool) -> list[int]:
        """The end points whose blocks the pool or a tier has, by what the tiers have said. Their rows do not count.

        With *at_once* those alone that can be loaded at once.
        """
        costs = self._costs_at_once(keys) if at_once else self._costs_in_time(request, keys, now)
        return [*find_ends(costs, room=0)][::-1]

    def _costs_at_once(self, keys: Sequence[_Keys]) -> list[GroupCosts]:
        costs = []
        for shape, of_group in zip(self._shapes, keys, strict=True):
            ready = self._state.ledger.are_ready(of_group)
            costs.append(GroupCosts(shape, [not is_ready for is_ready in ready], [0] * len(ready)))
        return costs

    def _costs_in_time(self, request: RequestState, keys: Sequence[_Keys], now: float) -> list[GroupCosts]:
        costs = []
        for shape, of_group in zip(self._shapes, keys, strict=True):
            group = GroupLookup(shape, of_group, self._state.ledger.find_all(of_group))
            verdicts = iter(self._judge(request, group, now))
            blocked = [block is None and not isinstance(next(verdicts), str) for block in group.blocks]
            costs.append(GroupCosts(shape, blocked, [0] * len(blocked)))
        return costs

    # -- deciding

    def _plan(self, request: RequestState, keys: Sequence[_Keys], now: float) -> _Plan:
        state = self._state
        groups = [
            GroupLookup(shape, of_group, state.ledger.find_all(of_group))
            for shape, of_group in zip(self._shapes, keys, strict=True)
        ]
        judged = [self._judge(request, group, now) for group in groups]
        if not any(None in verdicts for verdicts in judged):
            request.wait_until = None
        for group, verdicts in zip(groups, judged, strict=True):
            following = iter(self._tiers.bound_waiting(request, verdicts, now))
            group.verdicts = [next(following) if block is None else None for block in group.blocks]
        if self._is_prefix:
            groups[0].end_at_first_doubt()
        promotions = state.promotion_room
        if promotions <= 0 and not request.promoting and request not in state.planned:
            for group in groups:
                group.verdicts = [
                    MissReason.PRIMARY_FULL if isinstance(verdict, str) else verdict
                    for verdict in group.verdicts
                ]
        end = self._find_end(groups)
        losses = self.break_even.find_losses(groups, end, now)
        if losses:
            self._pass_over(request, groups, losses, now)
            end = self._find_end(groups)
        plan = self._choose(groups, end, promotions)
        for name in set(plan.promote.values()):
            request.be_patient(name, self.break_even.patience_s(name, groups, end))
        if not plan.retry:
            self._explain(request, groups, plan)
        self._commit(request, plan)
        return plan

    def _judge(self, request: RequestState, group: GroupLookup, now: float) -> list[Verdict]:
        """The tiers' verdicts on the group's blocks that the pool lacks."""
        absent = [key for key, block in zip(group.keys, group.blocks, strict=True) if block is None]
        return self._tiers.judge(request, absent, now, is_prefix=group.shape.window is None)

    def _pass_over(
        self, request: RequestState, groups: Sequence[GroupLookup], tiers: Sequence[str], now: float
    ) -> None:
        """Loading from *tiers* would be a loss: take the blocks from others, or have them computed (C35)."""
        for group in groups:
            indices = [index for index, verdict in enumerate(group.verdicts) if verdict in tiers]
            keys = [group.keys[index] for index in indices]
            for index in indices:
                if group.keys[index] not in request.passed_over:
                    self._state.tiers[str(group.verdicts[index])].counters.passed_over += 1
            request.passed_over.update(keys)
            is_prefix = group.shape.window is None
            judged = self._tiers.judge(request, keys, now, is_prefix=is_prefix, passed_over=tiers)
            judged = self._tiers.bound_waiting(request, judged, now)
            for index, verdict in zip(indices, judged, strict=True):
                group.verdicts[index] = MissReason.BREAK_EVEN if isinstance(verdict, MissReason) else verdict

    def _find_end(self, groups: Sequence[GroupLookup]) -> int:
        """The longest end point, were every key there that a tier has not denied yet."""
        ledger, holds = self._state.ledger, self._state.holds
        if holds:
            holds.make_room(sum(group.count_rows(ledger.is_idle) for group in groups))
        for group in groups:
            group.count_costs(ledger.is_idle)
        return find_end([group.costs for group in groups], ledger.room)

    def _choose(self, groups: Sequence[GroupLookup], end: int, promotions: float) -> _Plan:
        """Choose the blocks to hold and to promote for *end*: none behind a key whose verdict is unknown.

        While there is such a key the end point may still move. Only a lone prefix is promoted then, up to that key. A
        block without room among the *promotions*, or at its tier, waits, and so do all after it.
        """
        plan = _Plan(end)
        hold: list[tuple[int, Block]] = []  # by the token each ends at
        rooms = {name: tier.load_room for name, tier in self._state.tiers.items()}
        is_certain = self._is_prefix or all(
            group.blocks[index] is not None or group.verdicts[index] is not None
            for group in groups
            for index in group.shape.needed(end)
        )
        for group in groups:
            for index in group.shape.needed(end):
                block, key = group.blocks[index], group.keys[index]
                if block is not None:
                    hold.append(((index + 1) * group.shape.tokens_per_block, block))
                    continue
                tier = group.verdicts[index]
                if tier is None:
                    plan.unknown.append(key)
                    plan.retry[key] = None
                    break
                if key in plan.promote:
                    continue
                assert isinstance(tier, str)
                if is_certain and len(plan.promote) < promotions and rooms[tier] > 0:
                    plan.promote[key] = tier
                    rooms[tier] -= 1
                else:
                    plan.retry[key] = None
                    promotions = 0
        plan.hold = [block for _, block in sorted(hold, key=itemgetter(0))]
        return plan

    def _explain(self, request: RequestState, groups: Sequence[GroupLookup], plan: _Plan) -> None:
        """Why the end point is not the next one: the first key that can't be had, or no room."""
        unit = unit_of([group.shape for group in groups])
        if plan.end >= last_candidate([group.costs for group in groups]):
            return
        for group in groups:
            for index in group.shape.needed(plan.end + unit):
                verdict = group.verdicts[index]
                if isinstance(verdict, MissReason):
                    plan.reason = self._count_miss(request, group.keys[index], verdict)
                    return
        first = groups[0]
        key = first.keys[plan.end // first.shape.tokens_per_block]
        plan.reason = self._count_miss(request, key, MissReason.PRIMARY_FULL)

    def _commit(self, request: RequestState, plan: _Plan) -> None:
        state = self._state
        leases.grant(state, request, [block.key for block in plan.hold])
        for block in plan.hold:
            if block.state is ARRIVING and block.source:
                request.waited.add(block.key)
        if not plan.promote:
            return
        depths = range(-len(plan.promote), 0)
        reserved = state.ledger.reserve(list(plan.promote), chain=request.info.chain, depths=depths)
        assert reserved is not None, "the plan promised more than the pool has room for"
        new = reserved.blocks
        state.note_evicted(reserved.evicted)
        state.promoting_rows += len(new)
        for block in new:
            block.source = plan.promote[block.key]
            state.tiers[block.source].loading_rows += 1
            request.waited.add(block.key)
            state.plan_promotion(request, block)
        leases.grant(state, request, plan.promote)

    def _count_miss(self, request: RequestState, key: OffloadKey, reason: MissReason) -> MissReason:
        """Why *key* missed, counted once per request and key."""
        if reason is MissReason.NOT_STORED:
            if key in self._state.evicted:
                reason = MissReason.EVICTED
            elif self._state.admission.is_below(key):
                reason = MissReason.BELOW_THRESHOLD
        if key not in request.missed:
            self._state.counters.misses[reason] += 1
        request.missed[key] = reason
        return reason

    # -- remembering

    def _events(self, plan: _Plan) -> set[int]:
        """What *plan* waits for, as numbers of jobs and of a departure."""
        departure = self._state.departure
        events = self._tiers.asked_in(plan.unknown)
        events.update(block.writer or departure for block in plan.hold if block.state is not READY)
        if plan.promote:
            events.add(departure)
        return events
