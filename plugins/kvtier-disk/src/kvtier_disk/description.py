"""What a namespace stands for, in a file beside its blocks that only people read."""

import json
from collections.abc import Mapping
from typing import Any

from kvtier_disk.folder import Handle

NAME = "namespace.json"


def describe(directory: Handle, description: Mapping[str, Any], drafts: Handle) -> None:
    """Put *description* into a namespace's *directory*, unless it is there; drafts go where *drafts* says.

    Raises ``OSError``.
    """
    text = json.dumps(description, indent=2, sort_keys=True, default=str).encode() + b"\n"
    if directory.read(NAME, len(text)) != text:
        directory.publish(NAME, text, drafts)
