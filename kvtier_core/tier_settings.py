"""The settings every tier has (``TierSettings`` v1). A tier's own settings class subclasses it.

The fields here are the core's; a plugin that redefines one is refused. Every other core setting of a tier, now and
later, lives in ``[tiers.NAME.limits]``, so that the core can grow without colliding with a plugin's names.
"""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from kvtier_core.masking import mask_value
from kvtier_core.units import Duration, Size


class TierLimits(BaseModel):
    """``[tiers.NAME.limits]``: how long the core waits for a tier and how much it lends to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    open_retry: Annotated[Duration, Field(ge=0.01)] | None = None
    """Seconds after which a tier that could not open is tried again, the engine running without it; unset: no start."""
    lookup_timeout: Duration = 2.0
    """Seconds until an unanswered lookup is a miss."""
    load_timeout: Duration = 30.0
    """Seconds until a request stops waiting for a promotion."""
    store_timeout: Duration = 60.0
    """Seconds until a cascade's rows are unpinned."""
    miss_ttl: Duration = 30.0
    """Seconds for which a key that could not be loaded is not asked of the tier again; 0: the next request asks."""
    load_again_after: Duration = 10.0
    """Seconds for which a request does not ask again for what it waited for in vain, where ``miss_ttl`` is shorter."""
    presence_ttl: Duration = 5.0
    """Seconds for which a tier's answer about a key is believed, on top of the longest ``lookup_timeout``."""
    max_quarantined: Annotated[float, Field(gt=0, le=1)] = 0.10
    """Fraction of the pool that overdue loads may hold until no more go; all that is lent until a load is in time."""
    max_cascade: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Fraction of the pool that may be pinned for stores to this tier."""
    max_late_blocks: Annotated[int, Field(ge=0)] = 10_000
    """Blocks of requests that the tier gets as a whole which may wait until it is less far behind."""
    max_resident_keys: Annotated[int, Field(ge=1)] = 1_000_000
    """Keys of a tier on the blocking interface that are remembered as present; a tier that holds more is asked."""
    max_batch: Size = 4 << 20
    """Bytes that one batched call of a tier on the blocking interface may move, one block at least; a tier type that
    says so moves a few times as many where many wait (the disk tier: four times)."""
    retries: Annotated[int, Field(ge=0, le=100)] = 2
    """Further tries of a call on the blocking interface that raised ``ConnectionError`` or ``TimeoutError``."""
    retry_pause: Duration = 0.1
    """Seconds before the first further try; each following pause is twice as long."""
    max_waiting: Annotated[int, Field(ge=1)] = 10_000
    """Calls that may wait for a tier's hook thread before the tier hears of no new request."""
    max_remembered: Annotated[int, Field(ge=1)] = 100_000
    """Answers about keys, and keys that could not be loaded, that are remembered of a tier."""
    max_unanswered: Annotated[int, Field(ge=1)] = 1_000
    """Overdue lookups, and overdue stores, that the tier may leave unanswered; past it no more go until it answers."""
    max_events: Annotated[int, Field(ge=1)] = 65_536
    """Changes kept for events; past it the next events are the whole contents anew."""
    max_retired: Annotated[int, Field(ge=1)] = 4
    """Earlier instances (one a reset) that may still have calls running; past it a reset fails."""
    breaker_failures: Annotated[int, Field(ge=1)] = 3
    """Failures in a row after which the tier is taken out of the path."""
    breaker_pause: Duration = 1.0
    """Seconds of the first pause; each following pause is twice as long."""
    breaker_max_pause: Duration = 60.0
    """The longest pause."""


class TierSettings(BaseModel):
    """What ``[tiers.NAME]`` has for every type of tier."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    """Name of the tier type: an entry point of ``kvtier.tiers.v1``."""
    enabled: bool = True
    """Whether the tier takes part; its settings are checked all the same."""
    capacity: Size | None = None
    """Bytes the tier may hold; unset means the tier type's own default or no bound."""
    ttl: Duration | None = None
    """Seconds after which a stored block is no longer served."""
    policy: str = "lru"
    """Eviction policy: in which order blocks leave a full tier."""
    store_threshold: Annotated[int, Field(ge=1)] = 1
    """Offers for storing from which on the tier is given a block; each request counts once."""
    threads: Annotated[int, Field(ge=1, le=256)] = 4
    """I/O threads of a tier on the blocking interface. Where there are several, one is kept from stores."""
    limits: TierLimits = TierLimits()
    """How long the core waits for the tier and how much it lends to it."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """The fields, with secrets masked (C53)."""
        for name, value in super().__repr_args__():
            yield name, mask_value(name or "", value)
