"""Plugins: found through entry points, imported one by one, checked when loaded. Decides nothing about settings."""

from kvtier_core.plugins.check import check_tier_class
from kvtier_core.plugins.discovery import Offer, list_plugins, list_tier_types
from kvtier_core.plugins.loading import TierType, load_policy, load_tier_type

__all__ = [
    "Offer",
    "TierType",
    "check_tier_class",
    "list_plugins",
    "list_tier_types",
    "load_policy",
    "load_tier_type",
]
