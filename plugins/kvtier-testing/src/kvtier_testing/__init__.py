"""For those who write tiers: one test class for every tier, and the helpers it is made of.

``TierTests`` is imported when it is first used: the processes of the crash and damage tools start without pytest.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_testing.tiers import TierTests

__all__ = ["TierTests"]


def __getattr__(name: str) -> "type[TierTests]":
    """Import ``TierTests`` from its home."""
    if name != "TierTests":
        raise AttributeError(f"module 'kvtier_testing' has no attribute {name!r}")
    from kvtier_testing.tiers import TierTests  # noqa: PLC0415 - see above

    return TierTests
