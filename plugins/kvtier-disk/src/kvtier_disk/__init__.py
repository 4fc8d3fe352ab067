"""The disk tier: blocks in extents, or one file each, under a root directory."""

from kvtier_disk.files_tier import FilesTier
from kvtier_disk.settings import DiskSettings
from kvtier_disk.tier import DiskTier

__all__ = ["DiskSettings", "DiskTier", "FilesTier"]
