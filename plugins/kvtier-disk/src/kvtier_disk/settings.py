"""``[tiers.NAME]`` with ``type = "disk"``."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from kvtier_core.tier import Duration, Size, TierSettings, mask_text

DEFAULT_CAPACITY = 16 << 30
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})|%\w+%")


class DiskSettings(TierSettings):
    """``[tiers.NAME]`` with ``type = "disk"``."""

    root: Path
    """Directory that holds the blocks, such as `/var/cache/kvtier`; made if it is missing."""
    layout: Literal["extents", "files"] = "extents"
    """How blocks lie on disk: `"extents"` are large files with an index, `"files"` one file a block, as NFS needs."""
    extent_size: Annotated[Size, Field(ge=1 << 20, le=64 << 30)] = 64 << 20
    """Most bytes of an extent: the first has 4 MiB, later ones double what there is, up to an eighth of `capacity`."""
    min_free: Size | None = None
    """Bytes of the file system that stay free; unset: a twentieth of it, at most 1 GiB."""
    refresh: Annotated[Duration, Field(gt=0)] = 1.0
    """Seconds after which the tier knows what other processes stored and evicted."""
    read_only: bool = False
    """Whether the tier loads and never stores, as on a root that is mounted read-only."""
    allow_writable_by_others: bool = False
    """Whether a root is used that another user or a group may write to."""

    @field_validator("root", mode="before")
    @classmethod
    def _is_named(cls, root: object) -> object:
        """Refuse what would become a directory of a strange name below the working directory, or that directory itself.

        An empty root is what an unset shell variable leaves.
        """
        if root in ("", None):
            raise ValueError("must name a directory, and is empty")
        text = str(root)
        if "\0" in text:
            raise ValueError("must name a directory, and holds a NUL character, which no name can")
        if (url := _URL.match(text)) is not None:
            advice = f'write root = "/{text[url.end() :].lstrip("/")}"'
            if url[1].lower() != "file":
                advice = f'use the fsspec tier (type = "fsspec", url = "{mask_text(text)}")'
            raise ValueError(f"must name a directory, and {mask_text(text)!r} is a url: {advice}")
        if _DRIVE.match(text):
            raise ValueError(
                f"must name a directory, and {text!r} is a path of Windows: write one of this machine's"
            )
        if (variable := _VARIABLE.search(text)) is not None:
            raise ValueError(
                f"must name a directory, and {variable[0]} in {text!r} is not replaced by what the variable holds:"
                " write the path itself (~ is replaced by the user's home)"
            )
        try:
            return Path(text).expanduser()
        except RuntimeError as error:
            raise ValueError(
                f"must name a directory, and {text!r} begins with the home of a user that has none: write the path"
                " itself"
            ) from error
