"""The settings every tier has (``TierSettings`` v1). A tier's own settings class subclasses it.

The fields here are the core's. A plugin that redefines one is refused, but for another default of ``threads``. Every
other core setting of a tier, now and later, lives in ``[tiers.NAME.limits]``, so that the core can grow without
colliding with a plugin's names.
"""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from kvtier_core.masking import mask_value
from kvtier_core.units import Duration, Size

Threads = Annotated[int, Field(ge=1, le=256)]
"""The type of ``threads``. A tier type whose client wants another number gives it: ``threads: Threads = 1``."""


class TierLimits(BaseModel):
    """``[tiers.NAME.limits]``: how long the core waits for a tier and how much it lends to it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    open_retry: Annotated[Duration, Field(ge=0.01)] | None = None
    """Seconds after which a tier that could not open is tried again; unset, the engine does not start without it."""
    lookup_timeout: Duration = 2.0
    """Seconds until an unanswered lookup is a miss."""
    load_timeout: Duration = 30.0
    """Seconds until a request stops waiting for a load from the tier."""
    store_timeout: Duration = 60.0
    """Seconds until a store to the tier counts as failed."""
    miss_ttl: Duration = 30.0
    """Seconds for which the tier is not asked again for a key that it could not load."""
    max_quarantined: Annotated[float, Field(gt=0, le=1)] = 0.10
    """Share of the pool that late loads from the tier may hold before it gets no more loads."""
    max_cascade: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the pool that stores to the tier may hold."""
    max_resident_keys: Annotated[int, Field(ge=1)] = 1_000_000
    """Keys that are remembered as present, so that lookups need not ask the tier."""


class TierSettings(BaseModel):
    """What ``[tiers.NAME]`` has for every type of tier."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: str
    """Name of the tier type, such as `"disk"`."""
    enabled: bool = True
    """Whether the tier takes part."""
    capacity: Size | None = None
    """Bytes the tier may hold; unset, the tier type's own default."""
    ttl: Duration | None = None
    """Seconds after which a stored block is no longer served; unset, never."""
    policy: str = "lru"
    """Name of the eviction policy, which decides what leaves a full tier."""
    store_threshold: Annotated[int, Field(ge=1)] = 1
    """Requests that must offer a block before the tier is given it."""
    threads: Threads = 4
    """Threads that read and write the tier's storage."""
    limits: TierLimits = TierLimits()
    """How long the core waits for the tier, and how much of the pool it lends to it."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """The fields, with secrets masked (C53)."""
        for name, value in super().__repr_args__():
            yield name, mask_value(name or "", value)
