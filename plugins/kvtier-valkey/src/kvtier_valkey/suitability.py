"""Whether a server can hold blocks, and whether it keeps them within bounds, from what it says about itself.

Decides by the answer to ``INFO`` alone; no I/O.
"""

from collections.abc import Mapping
from typing import Any

from kvtier_core.tier import format_size


def why_not(info: Mapping[str, Any]) -> str | None:
    """Why the server can't be used, as the end of a sentence about it, with what to do."""
    if info.get("cluster_enabled"):
        return "is a node of a cluster, which is not followed; use a server of its own, or a proxy before the cluster"
    if info.get("role") == "slave":
        return "is a replica, which can't be written; set url to its primary"
    return None


def risk_of(info: Mapping[str, Any], ttl: float | None) -> str | None:
    """What will happen when the server has stored a lot, as the end of a sentence; ``None`` where blocks just leave."""
    policy, most = str(info.get("maxmemory_policy", "")), int(info.get("maxmemory", 0))
    if not most:
        return "has no maxmemory: blocks are stored until its machine has no memory left"
    full = f"once it holds {format_size(most)}, blocks are declined"
    if policy == "noeviction":
        return f"evicts nothing (maxmemory-policy noeviction): {full}"
    if policy.startswith("volatile") and ttl is None:
        return f"evicts only keys that expire (maxmemory-policy {policy}), and ttl is unset: {full}"
    return None
