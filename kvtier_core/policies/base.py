"""What an eviction policy is: the order in which blocks leave, and nothing else. How one of a plugin is watched.

A policy knows entries and their order, never bytes, the capacity in use, threads or time. It never evicts by itself:
its owner says how many must go. It is not thread-safe; its owner serialises the calls.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Generic, Protocol, Self, TypeVar

from kvtier_core.errors import PluginError
from kvtier_core.keys import OffloadKey


class Entry:
    """One block as a policy sees it. The owner makes it, keeps all but ``place``, and may subclass it.

    An entry is *held* while ``pins`` is above zero, or its key is in the ``keep`` of ``evict``: it must not be evicted
    then. Holding takes no call, which keeps the owner's hot path short: a policy finds out when it meets the entry.

    Entries are compared by identity. The owner may use one that has left for another block, with ``place`` at ``None``:
    so a policy remembers an evicted block by its key. A pool's loop makes entries empty and fills them itself, because
    making one takes longer than all else that is done for a block.
    """

    __slots__ = ("chain", "depth", "key", "pins", "place", "uses")

    key: OffloadKey
    chain: int
    """The request that stored or used the block last, as a number above 0 (``RequestInfo.chain``); 0 for none.

    A block is of use only while those before it in its prompt are there. So of one chain the deepest leaves first,
    however many calls it came in, and the whole chain was used when its last block was.
    """
    depth: int
    """Where the block stands in its chain, above all before it; 0 without a chain. Equal ones stay as they came."""
    pins: int
    uses: int
    """Uses that the policy has not noticed yet, one for each request. The owner adds, the policy resets."""
    place: Any
    """The policy's own, ``None`` before it has met the entry with this key."""

    @classmethod
    def of(cls, key: OffloadKey) -> Self:
        """A new entry that nobody holds."""
        entry = cls()
        entry.key = key
        entry.chain = entry.depth = entry.pins = entry.uses = 0
        entry.place = None
        return entry


E = TypeVar("E", bound=Entry)


class EvictionPolicy(Protocol[E]):
    """The order of eviction over the entries it was given.

    A policy may ignore chains. It then costs hits where prompts come in pieces, since their beginnings leave first.

    The cost of a call is proportional to the entries it is given or gives out, plus, over time, one look for each entry
    that was held or used since the policy last met it. Neither the number of entries nor the number held counts.
    The capacity that a policy was made with bounds what it remembers of evicted keys.
    """

    def insert(self, entries: Sequence[E]) -> None:
        """Learn entries that are not in the order. May be held.

        Of several in one call the last leaves first, and all of them before those of their chain that came earlier.
        """
        ...

    def release(self, entries: Sequence[E]) -> None:
        """These were held or used, and are held no longer. Of several in one call the last leaves first.

        An entry without ``uses`` was only held: that alone must not make it look new. One whose ``chain`` has changed
        takes its place there.
        """
        ...

    def remove(self, entries: Sequence[E]) -> None:
        """Forget entries, held or not, without remembering them as evicted. One that is not in the order is skipped."""
        ...

    def evict(self, n: int, keep: AbstractSet[OffloadKey]) -> list[E]:
        """Take the next *n* entries out of the order, none of them pinned or with a key in *keep*, and return them.

        The owner asks for no more than there are. *keep* may be large, and the owner changes it after the call: ask it
        about keys, and don't walk over it. A held entry that is met may be left out of the order until its
        ``release``, so that no later call meets it again.
        """
        ...


class CheckedPolicy(Generic[E]):
    """A plugin's policy, watched: one that gives out a block in use would cost wrong bytes.

    It passes every call on, and looks at every answer. *name* and *origin* are for messages.

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
