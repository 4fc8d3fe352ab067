"""A plugin's policy, watched: one that gives out a block in use would cost wrong bytes."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Generic

from kvtier_core.errors import PluginError
from kvtier_core.keys import OffloadKey
from kvtier_core.policies.base import E, EvictionPolicy


class CheckedPolicy(Generic[E]):
    """``EvictionPolicy`` that passes every call on and looks at every answer. *name* and *origin* are for messages.

    What the policy raises, whenever, comes up in ``evict`` alone: at all other calls its owner is in the middle of a
    change, and whoever waits for that would wait for ever.
    """

    def __init__(self, policy: EvictionPolicy[E], name: str, origin: str) -> None:
        self._policy = policy
        self._who = f"eviction policy {name!r} of {origin}"
        self._raised: str | None = None
        """By which call it raised what, the first time: since then nobody knows what it has in its order."""

    def insert(self, entries: Sequence[E]) -> None:
        """As the policy does. Raises nothing."""
        self._tell("insert", self._policy.insert, entries)

    def release(self, entries: Sequence[E]) -> None:
        """As the policy does. Raises nothing."""
        self._tell("release", self._policy.release, entries)

    def remove(self, entries: Sequence[E]) -> None:
        """As the policy does. Raises nothing."""
        self._tell("remove", self._policy.remove, entries)

    def evict(self, n: int, keep: AbstractSet[OffloadKey]) -> list[E]:
        """As the policy says. Raises ``PluginError`` unless that is *n* entries that may leave, or once it raised."""
        if self._raised is not None:
            raise self._broken(self._raised)
        try:
            victims = self._policy.evict(n, keep)
        except Exception as error:
            raise self._broken(_describe("evict", error)) from error
        self._check(victims, n, keep)
        return victims

    def _tell(self, name: str, method: Callable[[Sequence[E]], None], entries: Sequence[E]) -> None:
        try:
            method(entries)
        except Exception as error:  # noqa: BLE001 - somebody else's code
            self._raised = self._raised or _describe(name, error)

    def _check(self, victims: Sequence[E], n: int, keep: AbstractSet[OffloadKey]) -> None:
        if len(victims) != n or len(set(victims)) != n:
            problem = f"was asked for {n} blocks, and gave {len(set(victims))}"
        elif any(victim.pins for victim in victims):
            problem = "gave a block that is in use"
        elif any(victim.key in keep for victim in victims):
            problem = "gave a block that was to be kept"
        else:
            return
        raise self._broken(problem)

    def _broken(self, problem: str) -> PluginError:
        return PluginError(f"{self._who} {problem}: choose another policy, and report this to its author")


def _describe(method: str, error: Exception) -> str:
    return f"raised {type(error).__name__} in {method} ({error})"
