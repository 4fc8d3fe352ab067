"""Plugins: found through entry points, imported one by one, checked when loaded. Decides nothing about settings."""

from kvtier_core.plugins.check import check_tier_class
from kvtier_core.plugins.loading import TierType, class_of_tier, load_policy, load_tier_type

__all__ = [
    "TierType",
    "check_tier_class",
    "class_of_tier",
    "load_policy",
    "load_tier_type",
]
