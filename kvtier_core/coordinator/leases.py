"""Leases: which blocks a request was promised, from a lookup to the load, the end of the request or a timeout.

A promise is also what counts as a use of a block for the order of eviction: once for each request and block, when the
promise ends.
"""

from collections.abc import Iterable, Sequence

from kvtier_core.coordinator.state import RequestState, State
from kvtier_core.ledger import Block

_NOT_LEASED = object()


def grant(state: State, request: RequestState, blocks: Iterable[Block]) -> None:
    """Promise *blocks* to *request*; each once, however often it is looked up."""
    leases = request.leases
    fresh = dict.fromkeys(blocks)
    if leases:
        fresh = {block: None for block in fresh if block not in leases}
        leases.update(fresh)
    else:
        request.leases = fresh
    state.ledger.lease(fresh)


def use(state: State, request: RequestState, blocks: Sequence[Block]) -> None:
    """Count a use of *blocks*, which *request* was not promised, unless one was counted before."""
    used = request.used
    state.ledger.use([block for block in blocks if block not in used and block not in request.leases])
    used.update(blocks)


def end(state: State, request: RequestState, blocks: Sequence[Block]) -> None:
    """End the leases that *request* has on *blocks*, because it holds them otherwise, and count their use."""
    leases = request.leases
    leased = [block for block in blocks if leases.pop(block, _NOT_LEASED) is not _NOT_LEASED]
    state.ledger.unlease(leased, request.used)
    request.used.update(leased)
    if len(leased) < len(blocks):
        use(state, request, blocks)


def keep_only(state: State, request: RequestState, blocks: Sequence[Block]) -> None:
    """End the leases of *request* on all but *blocks*, which are among them: an end point moved."""
    if len(request.leases) == len(blocks):
        return
    kept = set(blocks)
    end(state, request, [block for block in request.leases if block not in kept])


def give_back(state: State, request: RequestState) -> None:
    """End every lease of *request*."""
    state.forget_answer(request)
    state.ledger.unlease(request.leases, request.used)
    request.used.update(request.leases)
    request.leases.clear()


def expire(state: State, now: float) -> None:
    """End the leases of requests that have not looked up for the lease timeout. Planned rows are not theirs to lose.

    Cost: one comparison, until the first lease can lapse.
    """
    timeout = state.limits.lease_timeout_s
    if now < state.no_lease_lapses_before:
        return
    first = now
    for request in state.requests.values():
        if not request.leases or request.promoting or request.planned:
            continue
        if request.last_lookup <= now - timeout:
            give_back(state, request)
        else:
            first = min(first, request.last_lookup)
    state.no_lease_lapses_before = first + timeout
