"""For those who write tiers: one test class for every tier, and the helpers it is made of.

The only part of the core that may import pytest; nothing in the core imports it. ``TierTests`` is imported when it is
first used, so that the simulator and the faulty tier need no pytest.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_core.testing.tiers import TierTests

__all__ = ["TierTests"]


def __getattr__(name: str) -> "type[TierTests]":
    """Import ``TierTests`` from its home."""
    if name != "TierTests":
        raise AttributeError(f"module 'kvtier_core.testing' has no attribute {name!r}")
    from kvtier_core.testing.tiers import TierTests  # noqa: PLC0415 - see above

    return TierTests
