"""Whole requests (C25): some tiers get all blocks of a request, also those that the pool held when they were offered.

A tier asks for it in ``on_new_request``, or another node is to go on with the request. Blocks on their way into the
pool follow when they are ready. While the tier is behind they wait, unpinned, and blocks of other requests are dropped.
One that has left the pool when its turn comes is dropped. Each (tier, request, key) is given once. The request's end
names the keys that were not.
"""

from collections.abc import Iterable, Sequence

from kvtier_core.coordinator.cascades import Cascades
from kvtier_core.coordinator.request_state import RequestState
from kvtier_core.coordinator.state import State
from kvtier_core.coordinator.tier_record import TierRecord
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import READY, Block


class RequestLevel:
    """Whole requests on the shared state."""

    def __init__(self, state: State, cascades: Cascades) -> None:
        self._state = state
        self._cascades = cascades

    def begin(self, request: RequestState, tier: str) -> None:
        """*tier* gets all that is offered of *request* from now on, if the request's filter allows it."""
        if request.may_store_to(tier) and tier not in request.whole:
            request.whole[tier] = {
                key: True for name, keys in request.cascaded if name == tier for key in keys
            }

    def offer(
        self, request: RequestState, keys: Sequence[OffloadKey], new: Sequence[OffloadKey], now: float
    ) -> None:
        """*keys* were offered for storing, of which *new* are on their way from the device: give the others too."""
        if not request.whole:
            return
        self._note_offered(request, keys)
        ready: list[Block] = []
        on_their_way = frozenset(new)
        for key in dict.fromkeys(keys):
            block = self._state.ledger.find(key)
            if block is None or key in on_their_way:
                continue
            if block.state is READY:
                ready.append(block)
            else:
                self._state.follow(request, block)
        self._give(request, ready, now)
        self.give_late(now)

    @staticmethod
    def _note_offered(request: RequestState, keys: Iterable[OffloadKey]) -> None:
        for given in request.whole.values():
            for key in keys:
                given.setdefault(key, False)

    def arrived(self, blocks: Sequence[Block], owner: RequestState | None, now: float) -> None:
        """The writer of *blocks* is done: the tiers that wait for a ready one get it, the others don't.

        *owner* is the request that offered the blocks itself, where the engine computed them.
        """
        if not self._state.following and (owner is None or not owner.whole):
            self.give_late(now)
            return
        ready: dict[RequestState, list[Block]] = {}
        if owner is not None:
            self._note_offered(owner, [block.key for block in blocks])
        left: dict[RequestState, None] = {}
        for block in blocks:
            receivers = self._state.following.pop(block, {})
            for request in receivers:
                request.late -= 1
                left[request] = None
            if owner is not None:
                receivers[owner] = None
            if block.state is READY:
                for request in receivers:
                    ready.setdefault(request, []).append(block)
        for request, theirs in ready.items():
            self._give(request, theirs, now)
            self._cascades.give_withheld(request, theirs, now)
        self.give_late(now)
        for request in left:
            self._state.forget_if_over(request)

    def lost(self, blocks: Iterable[Block]) -> None:
        """*blocks* will not become ready: nobody gets them."""
        for block in blocks:
            for request in self._state.following.pop(block, ()):
                request.late -= 1
                self._state.forget_if_over(request)

    def _give(self, request: RequestState, blocks: Sequence[Block], now: float) -> None:
        """Queue what each of the request's tiers has not been given, and drop what finds no room there."""
        for name, given in request.whole.items():
            tier = self._state.tiers[name]
            wanted = [block for block in blocks if given.get(block.key) is False]
            room = (
                self._state.limits.max_late_blocks
                + tier.max_cascade_rows
                - tier.cascade_rows
                - len(tier.late)
            )
            taken = wanted[: max(0, room)] if tier.may_store(now) else []
            tier.counters.dropped += len(wanted) - len(taken)
            given.update((block.key, True) for block in taken)
            request.late += len(taken)
            tier.late.extend((request, block.key) for block in taken)

    def give_late(self, now: float) -> None:
        """Hand out the blocks that wait, oldest first, until there is no room."""
        for tier in self._state.tiers.values():
            while tier.late:
                request = tier.late[0][0]
                chosen = self._take(tier, request, now)
                if chosen:
                    self._cascades.store(request, {tier.name: chosen}, now)
                self._state.forget_if_over(request)
                if tier.late and tier.late[0][0] is request:
                    break

    def _take(self, tier: TierRecord, request: RequestState, now: float) -> list[Block]:
        """Take the blocks of *request* at the head of the queue that have room, pinned; drop what is gone."""
        may_store = tier.may_store(now)
        chosen: list[Block] = []
        while tier.late and tier.late[0][0] is request:
            key = tier.late[0][1]
            block = self._state.ledger.find(key)
            if not may_store or block is None or block.state is not READY:
                tier.counters.dropped += 1
                request.whole[tier.name][key] = False
            elif self._cascades.has_room(tier, block):
                self._cascades.pin(tier, [block])
                chosen.append(block)
            else:
                break
            request.late -= 1
            tier.late.popleft()
        return chosen

    def reset(self) -> None:
        """A new cache epoch: nothing of the old one is given any more, and every key may be given again."""
        self._state.following.clear()
        for tier in self._state.tiers.values():
            tier.counters.dropped += len(tier.late)
            tier.late.clear()
        for request in list(self._state.requests.values()):
            request.cascaded.clear()
            for given in request.whole.values():
                given.clear()
            if request.late:
                request.late = 0
                self._state.forget_if_over(request)
