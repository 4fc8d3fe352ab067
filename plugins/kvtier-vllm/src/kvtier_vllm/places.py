"""What vLLM calls each of kvtier's tiers: in a request's filter, in its events, and as the source of a hit.

Decides by what a tier's type says of itself.
"""

from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import Locality, Medium
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier_core import Settings
from kvtier_core.tier import BlockTier

_SOURCES = {"disk": CacheHitSource.DISK, "memory": CacheHitSource.HOST}


@dataclass(frozen=True, kw_only=True)
class TierPlace:
    """One tier's place in vLLM's words."""

    medium: Medium
    locality: Locality
    hit_source: CacheHitSource
    is_shared: bool
    """Whether others change what it holds, too."""
    asks_for_requests: bool
    """Whether it may want whole requests (C25), which it says too late for vLLM to wait for."""


def tier_class_of(settings: Settings, name: str) -> type[Any]:
    """The class that serves the tier *name*: its type may choose among several by the tier's settings."""
    cls: type[Any] = settings.tier_types[name].cls
    return cls.for_settings(settings.tiers[name]) if issubclass(cls, BlockTier) else cls


def places_of(settings: Settings) -> dict[str, TierPlace]:
    """The place of each enabled tier."""
    places = {}
    for name in settings.enabled_tiers:
        tier_class = tier_class_of(settings, name)
        info = tier_class.info
        places[name] = TierPlace(
            medium=Medium.CPU if info.medium == "memory" else Medium.STORAGE,
            locality=Locality.REMOTE if info.shared else Locality.LOCAL,
            hit_source=_SOURCES.get(info.medium, CacheHitSource.EXTERNAL_UNSPECIFIED),
            is_shared=info.shared,
            asks_for_requests=hasattr(tier_class, "on_new_request"),
        )
    return places
