"""A plugin's policy, watched: one that gives out a block in use would cost wrong bytes."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Generic

from kvtier_core.errors import PluginError
from kvtier_core.keys import OffloadKey
from kvtier_core.policies.base import E, EvictionPolicy


class CheckedPolicy(Generic[E]):
    """``EvictionPolicy`` that passes every call on and looks at every answer. *name* and *origin* are for messages.

    Whatever the policy raises comes up in ``evict`` alone: at all other calls its owner is in the middle of a change,
    and an error would leave others waiting for ever.
    """

    def __init__(self, policy: EvictionPolicy[E], name: str, origin: str) -> None:
        self._policy = policy
        self._who = f"eviction policy {name!r} of {origin}"
        self._raised: str | None = None
        """What it raised first, and in which call: since then its order is unknown."""

    def insert(self, entries: Sequence[E]) -> None:
        """As the policy does. Raises nothing."""
        self._pass_on("insert", entries)

    def release(self, entries: Sequence[E]) -> None:
        """As the policy does. Raises nothing."""
        self._pass_on("release", entries)

    def remove(self, entries: Sequence[E]) -> None:
        """As the policy does. Raises nothing."""
        self._pass_on("remove", entries)

    def _pass_on(self, method: str, entries: Sequence[E]) -> None:
        try:
            getattr(self._policy, method)(entries)
        except Exception as error:  # noqa: BLE001 - somebody else's code
            self._raised = self._raised or _describe(method, error)

    def evict(self, n: int, keep: AbstractSet[OffloadKey]) -> list[E]:
        """As the policy says. Raises ``PluginError`` unless that is *n* entries that may leave, or once it raised."""
        if self._raised is not None:
            raise self._broken(self._raised)
        try:
            victims = self._policy.evict(n, keep)
        except Exception as error:
            raise self._broken(_describe("evict", error)) from error
        if len(victims) != n or len(set(victims)) != n:
            raise self._broken(f"was asked for {n} blocks, and gave {len(set(victims))}")
        if any(victim.pins for victim in victims):
            raise self._broken("gave a block that is in use")
        if any(victim.key in keep for victim in victims):
            raise self._broken("gave a block that was to be kept")
        return victims

    def _broken(self, problem: str) -> PluginError:
        return PluginError(f"{self._who} {problem}: choose another policy, and report this to its author")


def _describe(method: str, error: Exception) -> str:
    return f"raised {type(error).__name__} in {method} ({error})"
