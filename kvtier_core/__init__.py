"""kvtier: the place where the KV cache of language models lives when it no longer fits the GPU.

This page is the whole public surface, with ``kvtier_core.transfer`` (for those who write engine adapters). Names are
imported when they are first used: importing ``kvtier_core`` itself brings in none of torch, numpy and pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_core.blocktier import (
        BlockTier,
        SupportsBatch,
        SupportsChains,
        SupportsFollow,
        SupportsMarks,
        SupportsRemoval,
        SupportsScan,
        SupportsTouch,
    )
    from kvtier_core.errors import (
        ClosedError,
        ConfigError,
        KvtierError,
        PluginError,
        PoolError,
        TierOpenError,
        UnknownRequestError,
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
    from kvtier_core.manager import TierManager
    from kvtier_core.masking import mask_text, secrets_in_options
    from kvtier_core.namespace import GroupSpec, Namespace, is_of_one_process
    from kvtier_core.plugins import TierType, check_tier_class, list_tier_types, load_tier_type
    from kvtier_core.policies import Entry, EvictionPolicy, make_policy
    from kvtier_core.proof import Sealer
    from kvtier_core.runtime import (
        lasting_tiers,
        open_manager,
        open_session,
        plan_geometry,
        why_nothing_lasts,
    )
    from kvtier_core.session import EngineSession
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
        begin_of,
    )

    __version__: str

__all__ = [
    "BlockInfo",
    "BlockTier",
    "ClosedError",
    "ConfigError",
    "Direction",
    "Duration",
    "EngineSession",
    "Entry",
    "EvictionPolicy",
    "GroupSpec",
    "JobResult",
    "KvtierError",
    "LookupState",
    "MissReason",
    "MultimodalInput",
    "Namespace",
    "OffloadKey",
    "OffloadPolicy",
    "PluginError",
    "PoolError",
    "PoolSettings",
    "PoolView",
    "RequestIdentity",
    "RequestInfo",
    "Sealer",
    "Settings",
    "Size",
    "SupportsBatch",
    "SupportsChains",
    "SupportsFollow",
    "SupportsMarks",
    "SupportsRemoval",
    "SupportsScan",
    "SupportsTouch",
    "TierContext",
    "TierEvent",
    "TierHookSpecs",
    "TierInfo",
    "TierJob",
    "TierLimits",
    "TierManager",
    "TierOpenError",
    "TierSettings",
    "TierType",
    "TierUsage",
    "UnknownRequestError",
    "UnsupportedModelError",
    "__version__",
    "begin_of",
    "check_tier_class",
    "format_size",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "hash_blocks",
    "hookimpl",
    "hookspec",
    "is_of_one_process",
    "lasting_tiers",
    "list_tier_types",
    "load_settings",
    "load_tier_type",
    "make_offload_key",
    "make_policy",
    "mask_text",
    "open_manager",
    "open_session",
    "parse_duration",
    "parse_size",
    "plan_geometry",
    "root_hash",
    "secrets_in_options",
    "why_nothing_lasts",
]

_HOMES = {
    "BlockInfo": "values",
    "BlockTier": "blocktier",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "Direction": "values",
    "Duration": "units",
    "EngineSession": "session",
    "Entry": "policies",
    "EvictionPolicy": "policies",
    "GroupSpec": "namespace",
    "JobResult": "values",
    "KvtierError": "errors",
    "LookupState": "values",
    "MissReason": "values",
    "MultimodalInput": "keys",
    "Namespace": "namespace",
    "is_of_one_process": "namespace",
    "OffloadKey": "keys",
    "OffloadPolicy": "values",
    "PluginError": "errors",
    "PoolError": "errors",
    "PoolSettings": "settings",
    "PoolView": "values",
    "RequestIdentity": "keys",
    "RequestInfo": "values",
    "Sealer": "proof",
    "Settings": "settings",
    "Size": "units",
    "SupportsBatch": "blocktier",
    "SupportsChains": "blocktier",
    "SupportsFollow": "blocktier",
    "SupportsMarks": "blocktier",
    "SupportsRemoval": "blocktier",
    "SupportsScan": "blocktier",
    "SupportsTouch": "blocktier",
    "TierContext": "values",
    "TierEvent": "values",
    "TierHookSpecs": "hookspecs",
    "TierInfo": "values",
    "TierJob": "values",
    "TierLimits": "tier_settings",
    "TierManager": "manager",
    "TierOpenError": "errors",
    "TierSettings": "tier_settings",
    "TierType": "plugins",
    "TierUsage": "values",
    "UnknownRequestError": "errors",
    "UnsupportedModelError": "errors",
    "begin_of": "values",
    "check_tier_class": "plugins",
    "format_size": "units",
    "get_offload_block_hash": "keys",
    "get_offload_group_idx": "keys",
    "hash_blocks": "keys",
    "hookimpl": "hookspecs",
    "hookspec": "hookspecs",
    "lasting_tiers": "runtime",
    "list_tier_types": "plugins",
    "load_settings": "settings",
    "load_tier_type": "plugins",
    "make_offload_key": "keys",
    "make_policy": "policies",
    "mask_text": "masking",
    "secrets_in_options": "masking",
    "open_manager": "runtime",
    "open_session": "runtime",
    "parse_duration": "units",
    "parse_size": "units",
    "plan_geometry": "runtime",
    "root_hash": "keys",
    "why_nothing_lasts": "runtime",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    """Import a public name from its home when it is first used."""
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("kvtier-core")
    elif name in _HOMES:
        value = getattr(import_module(f"kvtier_core.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'kvtier_core' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names and what the module has of its own."""
    return sorted({*globals(), *__all__})
