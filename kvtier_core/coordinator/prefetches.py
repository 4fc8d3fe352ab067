"""Prefetches: prompts whose blocks come from tiers to the pool before their requests ask for them.

One at a time, the oldest first, by lookups like any other's. The blocks are promised to nobody once they have come. A
request that asks for itself needs no prefetch any more.
"""

from collections.abc import Sequence

from kvtier_core.coordinator import leases
from kvtier_core.coordinator.lookups import Lookups
from kvtier_core.coordinator.request_state import RequestState
from kvtier_core.coordinator.state import State
from kvtier_core.keys import OffloadKey


class Prefetches:
    """Prefetches on the shared state."""

    def __init__(self, state: State, lookups: Lookups) -> None:
        self._state = state
        self._lookups = lookups
        self._waiting: dict[RequestState, Sequence[Sequence[OffloadKey]]] = {}

    def add(self, request: RequestState, keys: Sequence[Sequence[OffloadKey]]) -> None:
        """Bring the prompt *keys* of *request*. Left out while too many wait."""
        if len(self._waiting) < self._state.limits.max_prefetches:
            self._waiting[request] = keys

    def end(self, request: RequestState) -> None:
        """*request* asks for itself, or is over."""
        self._waiting.pop(request, None)

    def go_on(self, now: float) -> None:
        """Look the oldest up, once. Its promotions leave at the end of this step."""
        if not self._waiting:
            return
        request, keys = next(iter(self._waiting.items()))
        if self._lookups.lookup(request, keys, now).is_settled:
            self.end(request)
            leases.give_back(self._state, request)
