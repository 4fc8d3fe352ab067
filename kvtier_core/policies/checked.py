"""A plugin's policy, watched: one that gives out a block in use would cost wrong bytes."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Generic

from kvtier_core.errors import PluginError
from kvtier_core.keys import OffloadKey
from kvtier_core.policies.base import E, EvictionPolicy


class CheckedPolicy(Generic[E]):
    """``EvictionPolicy`` that passes every call on and looks at every answer. *name* and *origin* are for messages."""

    def __init__(self, policy: EvictionPolicy[E], name: str, origin: str) -> None:
        self._policy = policy
        self._who = f"eviction policy {name!r} of {origin}"
        self.insert = policy.insert
        self.release = policy.release
        self.remove = policy.remove

    def evict(self, n: int, keep: AbstractSet[OffloadKey]) -> list[E]:
        """As the policy says. Raises ``PluginError`` unless that is *n* entries that may leave."""
        victims = self._policy.evict(n, keep)
        self._check(victims, n, keep)
        return victims

    def _check(self, victims: Sequence[E], n: int, keep: AbstractSet[OffloadKey]) -> None:
        if len(victims) != n or len(set(victims)) != n:
            problem = f"was asked for {n} blocks, and gave {len(set(victims))}"
        elif any(victim.pins for victim in victims):
            problem = "gave a block that is in use"
        elif any(victim.key in keep for victim in victims):
            problem = "gave a block that was to be kept"
        else:
            return
        raise PluginError(f"{self._who} {problem}: choose another policy, and report this to its author")
