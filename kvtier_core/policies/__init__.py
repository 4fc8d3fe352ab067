"""Eviction policies: small replaceable parts that decide in which order blocks leave (contract C14).

Pure: no threads, no clock, no I/O. Used by the pool's ledger and by the capacity bound of tiers on the blocking
interface.
"""

from collections.abc import Callable
from typing import Any

from kvtier_core.errors import ConfigError
from kvtier_core.policies.base import EvictionPolicy, K
from kvtier_core.policies.lru import LRU

__all__ = ["LRU", "EvictionPolicy", "make_policy"]

_POLICIES: dict[str, Callable[[int], EvictionPolicy[Any]]] = {"lru": lambda _capacity: LRU()}


def make_policy(name: str, capacity: int) -> EvictionPolicy[K]:
    """Make the policy called *name*; *capacity* (blocks) bounds what it remembers of removed keys.

    Raises ``ConfigError`` naming the known policies.
    """
    if name not in _POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}; known are: {', '.join(sorted(_POLICIES))}")
    return _POLICIES[name](capacity)
