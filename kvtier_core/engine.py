"""All that the author of an engine adapter imports, with ``kvtier_core.transfer`` for the copies."""

from kvtier_core.generation import Generation
from kvtier_core.hints import Hints, read_hints
from kvtier_core.interfaces import find_differences
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
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_core.prefill_cost import PrefillCost
from kvtier_core.runtime import (
    EngineParts,
    lasting_tiers,
    open_manager,
    open_parts,
    open_session,
    plan_geometry,
    why_nothing_lasts,
)
from kvtier_core.session import EngineSession
from kvtier_core.settings import PoolSettings
from kvtier_core.units import format_size, parse_duration
from kvtier_core.values import (
    Direction,
    Lookup,
    LookupState,
    MissReason,
    PreparedTransfer,
    RequestInfo,
    TierEvent,
)

__all__ = [
    "Direction",
    "EngineParts",
    "EngineSession",
    "Generation",
    "GroupSpec",
    "Hints",
    "Lookup",
    "LookupState",
    "MissReason",
    "MultimodalInput",
    "Namespace",
    "OffloadKey",
    "PoolSettings",
    "PrefillCost",
    "PreparedTransfer",
    "RequestIdentity",
    "RequestInfo",
    "TierEvent",
    "TierManager",
    "find_differences",
    "format_size",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "hash_blocks",
    "lasting_tiers",
    "make_offload_key",
    "open_manager",
    "open_parts",
    "open_session",
    "parse_duration",
    "plan_geometry",
    "read_hints",
    "root_hash",
    "why_nothing_lasts",
]
