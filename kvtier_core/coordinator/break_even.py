"""Break-even (C35): a tier from which loading would take longer than computing the same tokens is passed over.

The engine says what computing costs, and ``LoadTimes`` what loading costs. Without either nothing is passed over. A
tier that is passed over still gets a load at intervals, or nobody would learn that it has become faster.
"""

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
        without = find_end([g.costs_without(name) for g in groups], self._state.ledger.room)
        assert self.recompute_s is not None
        if load_s <= self.recompute_s * (end - without) * self._state.limits.break_even_margin:
            tier.probe_at = None
            return False
        is_probe = tier.probe_at is not None and now >= tier.probe_at
        if is_probe or tier.probe_at is None:
            tier.probe_at = now + self._state.limits.break_even_probe_s
        return not is_probe
