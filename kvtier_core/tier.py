"""All that the author of a tier imports: the blocking interface, the hook specs, and the values both are given."""

from kvtier_core.blocktier import (
    BlockTier,
    SupportsBatch,
    SupportsChains,
    SupportsFollow,
    SupportsHolds,
    SupportsMarks,
    SupportsRemoval,
    SupportsScan,
    SupportsTouch,
)
from kvtier_core.hookspecs import TierHookSpecs, hookimpl, hookspec
from kvtier_core.keys import OffloadKey
from kvtier_core.masking import mask_text, secrets_in_options
from kvtier_core.namespace import is_of_one_process
from kvtier_core.policies import Entry, EvictionPolicy, make_policy
from kvtier_core.proof import Sealer
from kvtier_core.tier_settings import Threads, TierLimits, TierSettings
from kvtier_core.units import Duration, Size, format_size, parse_duration, parse_size
from kvtier_core.values import (
    BlockInfo,
    JobResult,
    OffloadPolicy,
    PoolView,
    RequestInfo,
    TierContext,
    TierInfo,
    TierJob,
    begin_of,
)

__all__ = [
    "BlockInfo",
    "BlockTier",
    "Duration",
    "Entry",
    "EvictionPolicy",
    "JobResult",
    "OffloadKey",
    "OffloadPolicy",
    "PoolView",
    "RequestInfo",
    "Sealer",
    "Size",
    "SupportsBatch",
    "SupportsChains",
    "SupportsFollow",
    "SupportsHolds",
    "SupportsMarks",
    "SupportsRemoval",
    "SupportsScan",
    "SupportsTouch",
    "Threads",
    "TierContext",
    "TierHookSpecs",
    "TierInfo",
    "TierJob",
    "TierLimits",
    "TierSettings",
    "begin_of",
    "format_size",
    "hookimpl",
    "hookspec",
    "is_of_one_process",
    "make_policy",
    "mask_text",
    "parse_duration",
    "parse_size",
    "secrets_in_options",
]
