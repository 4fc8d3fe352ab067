"""The disk tier: one file a block under a root directory on a local disk."""

from kvtier_disk.tier import DiskSettings, DiskTier

__all__ = ["DiskSettings", "DiskTier"]
