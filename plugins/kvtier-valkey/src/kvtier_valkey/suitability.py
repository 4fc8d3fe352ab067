"""Whether a server can hold blocks, and whether it keeps them within bounds, from what it says about itself.

Decides by the answer to ``INFO`` alone; no I/O.
"""

from collections.abc import Mapping

from kvtier_core.tier import format_size

_MOST_DIGITS = 20
"""Of a size in bytes: what fits into 64 bits."""


def read_info(text: bytes) -> Mapping[str, str]:
    """The server's answer to ``INFO``: lines such as ``role:master``."""
    lines = text.decode(errors="replace").splitlines()
    return {name: value for name, _, value in (line.partition(":") for line in lines)}


def why_not(info: Mapping[str, str]) -> str | None:
    """Why the server can't be used, as the end of a sentence about it, with what to do."""
    if info.get("cluster_enabled") == "1":
        return "is a node of a cluster, which is not followed; use a server of its own, or a proxy before the cluster"
    if info.get("role") == "slave":
        return "is a replica, which can't be written; set url to its primary"
    return None


def risk_of(info: Mapping[str, str], ttl: float | None) -> str | None:
    """What will happen when the server has stored a lot, as the end of a sentence; ``None`` where blocks just leave."""
    policy, most = info.get("maxmemory_policy", ""), info.get("maxmemory", "")
    if not most.isdecimal() or len(most) > _MOST_DIGITS:
        return None  # it does not say
    if not int(most):
        return "has no maxmemory: blocks are stored until its machine has no memory left"
    full = f"once it holds {format_size(int(most))}, blocks are declined"
    if policy == "noeviction":
        return f"evicts nothing (maxmemory-policy noeviction): {full}"
    if policy.startswith("volatile") and ttl is None:
        return f"evicts only keys that expire (maxmemory-policy {policy}), and ttl is unset: {full}"
    return None
