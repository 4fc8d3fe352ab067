"""The acting part: threads, deadlines and hooks. The only layer that waits."""

from kvtier_core.manager.guard import TierIdentity
from kvtier_core.manager.manager import TierManager
from kvtier_core.manager.tiers import TierBuild

__all__ = ["TierBuild", "TierIdentity", "TierManager"]
