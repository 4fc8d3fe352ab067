"""Eviction policies: small replaceable parts that decide in which order blocks leave (contract C14).

Pure: no threads, no clock, no I/O. Used by the pool's ledger and by the capacity bound of tiers on the blocking
interface. Policies of plugins are found elsewhere and handed in; ``Order`` is there for them to be made of.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvtier_core.errors import ConfigError
from kvtier_core.policies.base import CheckedPolicy, E, Entry, EvictionPolicy
from kvtier_core.policies.order import LRU, Order, is_astray, leave

__all__ = [
    "BUILT_IN",
    "LRU",
    "CheckedPolicy",
    "E",
    "Entry",
    "EvictionPolicy",
    "Order",
    "PolicyFactory",
    "is_astray",
    "leave",
    "make_policy",
]

PolicyFactory = Callable[[int], EvictionPolicy[Any]]
"""Makes a policy; called with the capacity (blocks), which bounds what it remembers of evicted keys."""

BUILT_IN: Mapping[str, PolicyFactory] = {"lru": lambda _capacity: LRU()}


def make_policy(
    name: str, capacity: int, from_plugins: Mapping[str, PolicyFactory] | None = None
) -> EvictionPolicy[E]:
    """Make the policy called *name* for *capacity* blocks; a built-in name wins over one of *from_plugins*.

    Raises ``ConfigError`` naming the known policies.
    """
    known = {**(from_plugins or {}), **BUILT_IN}
    if name not in known:
        raise ConfigError(f"unknown eviction policy {name!r}; known are: {', '.join(sorted(known))}")
    return known[name](capacity)
