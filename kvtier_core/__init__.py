"""kvtier: the place where the KV cache of language models lives when it no longer fits the GPU.

This page is the whole public surface, with ``kvtier_core.testing`` (for those who write tiers) and
``kvtier_core.transfer`` (for those who write engine adapters). Names are imported when they are first used: importing
``kvtier_core`` itself brings in none of torch, numpy and pydantic.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_core.blocktier import BlockTier, SupportsBatch, SupportsScan
    from kvtier_core.errors import (
        ClosedError,
        ConfigError,
        KvtierError,
        PluginError,
        PoolError,
        TierOpenError,
        UnsupportedModelError,
    )
    from kvtier_core.hookspecs import TierHookSpecs, hookimpl, hookspec
    from kvtier_core.keys import (
        MultimodalInput,
        OffloadKey,
        RequestIdentity,
        get_offload_block_hash,
        get_offload_group_idx,
        hash_blocks,
        make_offload_key,
        root_hash,
    )
    from kvtier_core.namespace import GroupSpec, Namespace, digest_weights
    from kvtier_core.plugins import TierType, check_tier_class, list_tier_types, load_tier_type
    from kvtier_core.settings import PoolSettings, Settings, load_settings
    from kvtier_core.tier_settings import TierLimits, TierSettings
    from kvtier_core.units import Duration, Size, format_size, parse_duration, parse_size
    from kvtier_core.values import (
        BlockInfo,
        Direction,
        JobResult,
        LookupState,
        MissReason,
        OffloadPolicy,
        PoolView,
        RequestInfo,
        TierContext,
        TierEvent,
        TierInfo,
        TierJob,
        TierUsage,
    )

    __version__: str

_HOMES = {
    "blocktier": ("BlockTier", "SupportsBatch", "SupportsScan"),
    "errors": (
        "ClosedError",
        "ConfigError",
        "KvtierError",
        "PluginError",
        "PoolError",
        "TierOpenError",
        "UnsupportedModelError",
    ),
    "hookspecs": ("TierHookSpecs", "hookimpl", "hookspec"),
    "keys": (
        "MultimodalInput",
        "OffloadKey",
        "RequestIdentity",
        "get_offload_block_hash",
        "get_offload_group_idx",
        "hash_blocks",
        "make_offload_key",
        "root_hash",
    ),
    "namespace": ("GroupSpec", "Namespace", "digest_weights"),
    "plugins": ("TierType", "check_tier_class", "list_tier_types", "load_tier_type"),
    "settings": ("PoolSettings", "Settings", "load_settings"),
    "tier_settings": ("TierLimits", "TierSettings"),
    "units": ("Duration", "Size", "format_size", "parse_duration", "parse_size"),
    "values": (
        "BlockInfo",
        "Direction",
        "JobResult",
        "LookupState",
        "MissReason",
        "OffloadPolicy",
        "PoolView",
        "RequestInfo",
        "TierContext",
        "TierEvent",
        "TierInfo",
        "TierJob",
        "TierUsage",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604 - one list of names, above
    *sorted(_HOME_OF)
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    """Import a public name from its home when it is first used."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        value: Any = version("kvtier-core")
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(f"kvtier_core.{_HOME_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'kvtier_core' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names and what the module has of its own."""
    return sorted({*globals(), *__all__, "__version__"})
