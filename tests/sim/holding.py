"""What hints keep in the pool stays there (retain, pin). It looks at the coordinator's state and changes nothing."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from kvtier_core.coordinator.state import State
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import Ledger
from tests.sim.hook_order import InvariantError


@dataclass(frozen=True)
class Before:
    """What could leave before a store, but for the keys that it names, and the ranks of what was held."""

    free_to_leave: Collection[OffloadKey]
    ranks: dict[OffloadKey, float]


def look(state: State, keep: Collection[OffloadKey]) -> Before:
    """What could leave now, but for *keep*."""
    idle = {block.key for block in state.ledger.blocks if state.ledger.is_idle(block)}
    ranks = {key: holds[0].rank for key, holds in state.holds.by_key.items()}
    return Before(idle.difference(keep), ranks)


def check_left(before: Before, ledger: Ledger, evicted: Collection[OffloadKey]) -> bool:
    """No pinned block was *evicted*, and a retained one only after all that could leave. Whether one was."""
    held = [key for key in evicted if key in before.ranks]
    if any(before.ranks[key] == math.inf for key in held):
        raise InvariantError(f"{held} were pinned and have left")
    stayed = [key for key in before.free_to_leave if ledger.find(key) is not None]
    if held and stayed:
        raise InvariantError(f"{held} were retained, and left while {stayed} could have left")
    return bool(held)


def check_holds(state: State) -> None:
    """No more is pinned than may be, and each hold's books agree."""
    holds = state.holds
    if holds.num_pinned > state.limits.max_pinned_rows:
        raise InvariantError(f"{holds.num_pinned} blocks are pinned")
    strongest = [found[0] for found in holds.by_key.values()]
    assert {key for hold in strongest for key in hold.keys} == holds.by_key.keys()
    assert holds.num_pinned == sum(hold.rank == math.inf for hold in strongest)
