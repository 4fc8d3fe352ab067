"""``namespace.json``: what a namespace stands for, for people, and until when it counts as in use, for other engines.

Each engine writes it at its start and every minute after, for the hour to come. So a namespace is out of use an hour
after its last engine ended in any way, and at once where no other engine can have it (``is_of_one_process``) and that
engine was closed.
"""

import json
import math
import time
from collections.abc import Mapping
from typing import Any

NAME = "namespace.json"
LONGEST = 1 << 20
"""Bytes of a description that are read: more than any has."""

_UNTIL = "in_use_until"
_IN_USE_S = 3600.0  # many times the interval of writing, and more than clocks of machines may differ


def text_of(description: Mapping[str, Any], *, in_use: bool) -> bytes:
    """What to write for a namespace that is in use, or is left for good."""
    until = int(time.time() + _IN_USE_S) if in_use else 0  # seconds since the epoch
    said = {**description, _UNTIL: until}
    return json.dumps(said, indent=2, sort_keys=True, default=str).encode() + b"\n"


def is_one(content: bytes) -> bool:
    """Whether this is a namespace's description."""
    return _until(content) is not None


def is_out_of_use(content: object) -> bool:
    """Whether this describes a namespace that no engine uses; not what can't be read, or is no description."""
    until = _until(content) if isinstance(content, bytes) else None
    return until is not None and until < time.time()


def _until(content: bytes) -> float | None:
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):  # somebody else's file, perhaps nested without end
        return None
    until = said.get(_UNTIL) if isinstance(said, dict) else None
    is_time = isinstance(until, int | float) and not isinstance(until, bool) and math.isfinite(until)
    return until if is_time else None
