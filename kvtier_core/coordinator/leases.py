"""Leases: which keys a request was promised, from a lookup to the load, the end of the request or a timeout.

The end of a promise counts as a use of the block in the order of eviction, once for each request and key.
"""

from collections.abc import Collection, Iterable, Sequence

from kvtier_core.coordinator.request_state import RequestState
from kvtier_core.coordinator.state import State
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import Block

_ABOVE_ALL = -(1 << 40)
"""The depth of the first block that a request reads: above all that it offers, however many it reads."""


def grant(state: State, request: RequestState, keys: Collection[OffloadKey]) -> None:
    """Promise the blocks of *keys*, which the pool holds, to *request*; each once, however often it is looked up."""
    if not keys:
        return
    fresh = set(keys)
    if request.leases:
        fresh -= request.leases
        request.leases |= fresh
    else:
        request.leases = fresh
    if len(fresh) < len(keys):
        keys = [key for key in dict.fromkeys(keys) if key in fresh]
    request.promised += keys
    state.ledger.lease(fresh)


def use(state: State, request: RequestState, blocks: Sequence[Block], depths: Sequence[int]) -> None:
    """Count a use of *blocks*, at *depths* of *request*, but for those that it was promised, or has used before."""
    used, leased = request.used, request.leases
    fresh = [
        (block, depth)
        for block, depth in zip(blocks, depths, strict=True)
        if block.key not in used and block.key not in leased
    ]
    state.ledger.use(fresh, request.info.chain)
    used.update([block.key for block, _ in fresh])


def end(state: State, request: RequestState, keys: Sequence[OffloadKey]) -> int:
    """End the leases of *request* on some of *keys*, as uses, and return how many. The prompt's head goes first."""
    leased = _leased(request, keys)
    _unlease(state, request, leased, _ABOVE_ALL + request.read)
    request.read += len(leased)
    return len(leased)


def _leased(request: RequestState, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
    """Take from *request* its promises of *keys*. Returns the keys that were promised."""
    leased = keys
    if len(request.leases.intersection(keys)) < len(keys):  # some are not promised, or named twice
        leased = [key for key in dict.fromkeys(keys) if key in request.leases]
    request.leases.difference_update(leased)
    if len(request.promised) > 2 * len(request.leases):
        request.promised = _in_order(request)
    return leased


def _unlease(state: State, request: RequestState, keys: Sequence[OffloadKey], depth: int) -> None:
    state.ledger.unlease(keys, request.used, chain=request.info.chain, depth=depth)
    request.used.update(keys)


def _in_order(request: RequestState) -> list[OffloadKey]:
    """The keys that are promised to *request*, in the order of the promises."""
    leases = request.leases
    return [key for key in dict.fromkeys(request.promised) if key in leases] if leases else []


def keep_only(state: State, request: RequestState, keys: Iterable[OffloadKey]) -> None:
    """End the leases of *request* on all but *keys*, which come before the others: an end point moved."""
    kept = set(keys)
    if request.leases != kept:
        rest = _leased(request, [key for key in _in_order(request) if key not in kept])
        _unlease(state, request, rest, -len(rest))


def give_back(state: State, request: RequestState) -> None:
    """End every lease of *request*."""
    request.pending = None
    end(state, request, _in_order(request))
    request.promised.clear()


def expire(state: State, now: float) -> None:
    """End the leases of requests that have not looked up for the lease timeout. Planned rows are not theirs to lose.

    Cost: one comparison, until the first lease can lapse.
    """
    timeout = state.limits.lease_timeout_s
    if now < state.no_lease_lapses_before:
        return
    first = now
    for request in state.requests.values():
        if not request.leases or request.promoting or request in state.planned:
            continue
        if request.last_lookup <= now - timeout:
            give_back(state, request)
        else:
            first = min(first, request.last_lookup)
    state.no_lease_lapses_before = first + timeout
