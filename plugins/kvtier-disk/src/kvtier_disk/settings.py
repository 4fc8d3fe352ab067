"""``[tiers.NAME]`` with ``type = "disk"``."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from kvtier_core import Duration, Size, TierSettings

DEFAULT_CAPACITY = 16 << 30


class DiskSettings(TierSettings):
    """``[tiers.NAME]`` with ``type = "disk"``."""

    root: Path
    """Directory that holds the blocks, one directory a namespace below it; made if it is missing."""
    layout: Literal["extents", "files"] = "extents"
    """`"extents"`: large files with slots, and an index; `"files"`: one file a block, for network file systems."""
    extent_size: Annotated[Size, Field(ge=1 << 20, le=64 << 30)] = 64 << 20
    """Bytes of a new extent, at most an eighth of the capacity; one block at least."""
    min_free: Size = 1 << 30
    """Bytes of the file system that stay free: nothing is stored beyond, and extents are given back for it."""
    refresh: Annotated[Duration, Field(gt=0)] = 1.0
    """Seconds after which what other processes stored and evicted is known, and blocks past their `ttl` are gone."""
    max_open_extents: Annotated[int, Field(ge=1)] = 128
    """Extents kept open at a time, two file descriptors each."""
    read_only: bool = False
    """Load and never store, as on a root that is mounted read-only."""
    allow_writable_by_others: bool = False
    """Use a root that another user or a group owns or may write to; what is made there gets its mode and group."""

    @field_validator("root", mode="before")
    @classmethod
    def _is_named(cls, root: object) -> object:
        """An empty root would be the working directory: what an unset shell variable leaves."""
        if root in ("", None):
            raise ValueError("must name a directory, and is empty")
        if "\0" in str(root):
            raise ValueError("must name a directory, and holds a NUL character, which no name can")
        return root
