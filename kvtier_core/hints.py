"""What a client knows about the use of a request's blocks. A hint saves or costs hits, and never changes an answer.

Decides what each hint may ask for. What comes of it is the coordinator's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_SECONDS = 3600.0
"""A hint ends after an hour: nobody takes back what a client forgot."""
MAX_PRIORITY = 100
MAX_ACTIONS = 100
"""Of one request: each takes some microseconds of the engine's thread, and all requests wait for it."""
VERSION = "1"
"""Of each kind of hint, with any minor release, such as 1.0."""


def _check_count(name: str, value: object, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{name} must be a whole number from 0 to {most}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Hints:
    """The hints of one request, about the blocks of its own prompt. Raises ``ValueError`` for what can't be meant.

    Times are in seconds, at most an hour, and begin when the request last stored or loaded a block.
    """

    retain_s: float = 0.0
    """How long its blocks leave the pool only when nothing else can, those of the lowest *priority* first."""
    priority: int = 0
    pin_s: float = 0.0
    """How long its blocks stay in the pool, whatever else needs room: the first *pin_bytes*, or all."""
    pin_bytes: int | None = None
    prefetch: bool = False
    """Whether its blocks are brought from tiers to the pool before the request asks for them."""
    drop: bool = False
    """Whether no other request will need what it computes: no tier gets that, and it leaves the pool at the end."""
    num_unknown: int = 0
    """Hints that were given and not understood."""

    def __post_init__(self) -> None:
        for name in ("retain_s", "pin_s"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
                raise ValueError(f"{name} must be a number of seconds, not {seconds!r}")
            object.__setattr__(self, name, float(min(seconds, MAX_SECONDS)))
        _check_count("priority", self.priority, MAX_PRIORITY)
        if self.pin_bytes is not None:
            _check_count("pin_bytes", self.pin_bytes)
        for name in ("prefetch", "drop"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")  # noqa: TRY004

    @property
    def keeps(self) -> bool:
        """Whether blocks are to stay in the pool. Not those that are to be dropped."""
        return not self.drop and (self.retain_s > 0 or self.pin_s > 0)

    def count(self) -> Mapping[str, int]:
        """How many hints there are of each kind."""
        return {
            "retain": self.retain_s > 0,
            "pin": self.pin_s > 0,
            "prefetch": self.prefetch,
            "drop": self.drop,
            "unknown": self.num_unknown,
        }


NO_HINTS = Hints()
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "retain": {"seconds": "retain_s", "priority": "priority"},
    "pin": {"seconds": "pin_s", "bytes": "pin_bytes"},
    "prefetch": {},
    "drop": {},
}
"""By kind: what its payload may have, and the field of ``Hints`` that it sets."""


def read_hints(actions: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Hints:
    """The hints in *actions*: kind, version and payload of each. What can't be understood is counted. Raises nothing.

    Example: ``[("pin", "1", {"seconds": 60, "bytes": 1 << 30}), ("drop", "1", {})]``. Of two of a kind the last holds.
    ``kv.pin`` is the same as ``pin``. What comes after the first ``MAX_ACTIONS`` is not read, and counted as well.
    """
    said: dict[str, Any] = {}
    unknown = max(0, len(actions) - MAX_ACTIONS)
    for kind, version, payload in actions[:MAX_ACTIONS]:
        try:
            of_kind = _read(kind, version, payload)
            Hints(**of_kind)
        except Exception:  # noqa: BLE001 - a client's objects may raise anything
            unknown += 1
        else:
            said.update(of_kind)
    return Hints(**said, num_unknown=unknown)


def _read(kind: str, version: str, payload: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields that one action sets. Raises what a strange one brings about."""
    fields = _FIELDS[kind.removeprefix("kv.")]
    if version.partition(".")[0] != VERSION:
        raise ValueError(f"{kind} has no version {version!r}")
    said = {fields[name]: value for name, value in payload.items()}
    if not fields:
        return {kind.removeprefix("kv."): True}
    if not said[fields["seconds"]] > 0:
        raise ValueError(f"{kind} needs a time")
    return said
