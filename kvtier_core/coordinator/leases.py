"""Leases: which blocks a request was promised, from a lookup to the load, the end of the request or a timeout."""

from collections.abc import Collection, Iterable

from kvtier_core.coordinator.state import RequestState, State
from kvtier_core.ledger import Block


def grant(state: State, request: RequestState, block: Block) -> None:
    """Promise *block* to *request*; once, however often it is looked up."""
    if request.leases.get(block.key) is not block:
        state.ledger.lease(block)
        request.leases[block.key] = block


def grant_all(state: State, request: RequestState, blocks: Iterable[Block]) -> None:
    """``grant`` for each of *blocks*."""
    for block in blocks:
        grant(state, request, block)


def keep_only(state: State, request: RequestState, blocks: Collection[Block]) -> None:
    """End the leases of *request* on all but *blocks*, which are among them: an end point moved."""
    if len(request.leases) == len(blocks):
        return
    kept = {block.key for block in blocks}
    for key in [key for key in reversed(request.leases) if key not in kept]:
        state.ledger.unlease(request.leases.pop(key))


def give_back(state: State, request: RequestState) -> None:
    """End every lease of *request*, the prefix's tail first, so that the tail is evicted before the head."""
    state.forget_answer(request)
    while request.leases:
        _, block = request.leases.popitem()
        state.ledger.unlease(block)


def expire(state: State, now: float) -> None:
    """End the leases of requests that have not looked up for the lease timeout. Planned rows are not theirs to lose."""
    oldest = now - state.limits.lease_timeout_s
    for request in state.requests.values():
        if request.leases and request.last_lookup <= oldest and not request.promoting and not request.planned:
            give_back(state, request)
