"""How large and how strict a simulated world is. It decides nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.tier_settings import TierLimits
from tests.policies.every import EVERY
from tests.sim.scripted import TierScript

_PLAIN = (GroupShape(),)
_GROUPS: Sequence[Sequence[GroupShape]] = (
    _PLAIN,
    _PLAIN,
    _PLAIN,
    (GroupShape(), GroupShape(window=2)),
    (GroupShape(), GroupShape(2)),
    (GroupShape(2), GroupShape(1, window=3), GroupShape(4, window=5)),
    (GroupShape(window=2),),
)
"""What a drawn world's groups are: mostly one plain one."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a run's world is.

    ``max_requests`` bounds those alive at once, ``max_blocks`` their tokens (one a block, in a plain group),
    ``num_roots`` is the number of different first blocks: the fewer, the more is shared.
    """

    num_rows: int
    tiers: Sequence[TierScript]
    limits: PoolLimits
    max_requests: int
    max_blocks: int
    num_roots: int = 3
    groups: Sequence[GroupShape] = (GroupShape(),)
    policy: str = "lru"
    recompute_s: float | None = None
    """What the engine says a token takes to compute."""

    @staticmethod
    def draw(random: Random) -> "Shape":
        """A tiny world: little room makes every conflict frequent."""
        num_rows = random.randint(2, 16)
        tiers = [_draw_tier(random, name) for name in "xyz"[: random.randint(1, 3)]]
        limits = PoolLimits(
            max_promotion_rows=max(1, num_rows // random.choice((1, 2, 2, 4))),
            max_cascade_rows=max(1, num_rows // random.choice((1, 2))),
            max_loading_rows=max(1, int(num_rows * random.choice((0.5, 0.75, 1.0, 1.0)))),
            max_pinned_rows=num_rows // random.choice((2, 4, 8)),
            max_holds=random.choice((1, 1000)),
            max_prefetches=random.choice((1, 1000)),
            lease_timeout_s=10.0,
            device_timeout_s=20.0,
            store_threshold=random.choice((1, 1, 1, 2)),
            break_even_probe_s=5.0,
            presence_ttl_s=random.choice((0.5, 3.0)),
            max_unanswered=random.choice((2, 1000)),
            breaker_failures=random.choice((2, 3)),
            breaker_max_pause_s=8.0,
        )
        return Shape(
            num_rows=num_rows,
            tiers=tiers,
            limits=limits,
            max_requests=random.randint(1, 6),
            max_blocks=random.randint(2, num_rows + 4),
            num_roots=random.choice((2, 4, 8, 16)),
            groups=random.choice(_GROUPS),
            policy=random.choice(sorted(EVERY)),
            recompute_s=random.choice((None, None, 0.1, 1.0)),
        )


def _draw_tier(random: Random, name: str) -> TierScript:
    return TierScript(
        name=name,
        resident=random.random() < 0.4,
        remembers=random.choice((4, 1000)),
        obeys_reset=random.random() < 0.5,
        store_threshold=random.choice((1, 1, 1, 2)),
        limits=TierLimits(
            lookup_timeout=2.0,
            load_timeout=5.0,
            store_timeout=6.0,
            miss_ttl=random.choice((0.0, 1.0, 4.0)),
            max_quarantined=random.choice((0.1, 0.5, 1.0, 1.0)),
            max_cascade=random.choice((0.25, 1.0)),
        ),
    )
