"""The fsspec tier: one object a block behind any fsspec URL, shared by every engine that is given the URL."""

from kvtier_fsspec.settings import FsspecSettings
from kvtier_fsspec.tier import FsspecTier

__all__ = ["FsspecSettings", "FsspecTier"]
