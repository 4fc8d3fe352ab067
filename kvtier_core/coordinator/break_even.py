"""Break-even (C35): a tier from which loading would take longer than computing the same tokens is passed over.

The engine says what computing costs, and ``LoadTimes`` what loading costs. Without either nothing is passed over. A
tier that is passed over still gets a load at intervals, or nobody would learn that it has become faster. A load that
was begun all the same is waited for no longer than computing takes.
"""

import math
from collections.abc import Sequence

from kvtier_core.coordinator.endpoints import find_end
from kvtier_core.coordinator.group_lookup import GroupLookup
from kvtier_core.coordinator.state import State


class BreakEven:
    """Break-even on the shared state."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.recompute_s: float | None = None
        """Seconds to compute a token."""

    def find_losses(self, groups: Sequence[GroupLookup], end: int, now: float) -> list[str]:
        """The tiers whose blocks had better be computed than loaded for the end point *end*."""
        if self.recompute_s is None:
            return []
        blocks: dict[str, int] = {}
        for group in groups:
            for index in group.shape.needed(end):
                verdict = group.verdicts[index]
                if isinstance(verdict, str):
                    blocks[verdict] = blocks.get(verdict, 0) + 1
        return [t for t, n in blocks.items() if self._is_loss(t, n, groups, end, now)]

    def _is_loss(self, name: str, blocks: int, groups: Sequence[GroupLookup], end: int, now: float) -> bool:
        tier = self._state.tiers[name]
        load_s = tier.load_times.predict(blocks)
        if load_s is None:
            return False
        if load_s <= self.patience_s(name, groups, end):
            tier.probe_at = None
            return False
        is_probe = tier.probe_at is not None and now >= tier.probe_at
        if is_probe or tier.probe_at is None:
            tier.probe_at = now + self._state.limits.break_even_probe_s
        return not is_probe

    def patience_s(self, name: str, groups: Sequence[GroupLookup], end: int) -> float:
        """After how many seconds a load of what *name* holds for *end* is a loss; never where the cost is unknown."""
        if self.recompute_s is None:
            return math.inf
        without = find_end([g.costs_without(name) for g in groups], self._state.ledger.room)
        return self.recompute_s * (end - without) * self._state.limits.break_even_margin
