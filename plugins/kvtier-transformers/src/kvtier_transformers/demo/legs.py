"""What the demo's processes tell each other: plain data that goes through JSON.

Decides nothing. ``Order`` goes to a worker, ``Answer`` and ``WorkerReport`` come back.
"""

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


class Leg(enum.StrEnum):
    """One way of answering the questions."""

    PLAIN = "plain"
    """No kvtier at all: transformers' own cache, empty at every question. All others are measured against it."""
    COLD_TIERS = "cold_tiers"
    """kvtier with empty tiers: the price of storing."""
    POOL = "pool"
    """The same process again: the KV comes from the host memory pool."""
    DISK = "disk"
    """A new process with an empty pool: the KV comes from the disk tier."""

    @property
    def heading(self) -> str:
        """What people read."""
        return {
            Leg.PLAIN: "no cache",
            Leg.COLD_TIERS: "kvtier, tiers empty",
            Leg.POOL: "kvtier, from the pool",
            Leg.DISK: "kvtier, new process, from disk",
        }[self]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What one worker process is to do: these legs, these questions (by index), in this order."""

    legs: tuple[Leg, ...]
    questions: tuple[int, ...]
    directory: str
    """Where ``kvtier.toml``, the tier's data and the logits are."""
    prefix_tokens: int
    answer_tokens: int
    threads: int | None
    overhead_pairs: int = 0
    """Cold runs with and without kvtier, one of each a pair, whose CPU time is compared."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``."""
        legs = tuple(Leg(leg) for leg in data["legs"])
        return cls(**{**data, "legs": legs, "questions": tuple(data["questions"])})

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question answered on one leg."""

    leg: Leg
    question: int
    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    ttft_s: float
    load_s: float
    """Seconds of ``ttft_s`` spent looking up and loading."""
    hits_by_tier: Mapping[str, int]
    logits_file: str
    """The logits the first token was chosen from, as a numpy file."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``."""
        return cls(**{**data, "leg": Leg(data["leg"]), "token_ids": tuple(data["token_ids"])})

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class OverheadPair:
    """CPU seconds, all threads together, of the same cold run without kvtier and with empty tiers, stores and all."""

    plain_cpu_s: float
    tiers_cpu_s: float

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``."""
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What a worker knows beside its answers."""

    bytes_per_token: int
    integrity_misses: int
    """Blocks that a tier returned and the proof refused."""
    disk_read_vs_raw: float | None = None
    """The disk tier's time to read the prefix over the time to read as many bytes of its files without it."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``."""
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)
