"""What an eviction policy is: the order in which blocks leave, and nothing else.

A policy knows keys and their order. It never knows bytes, capacity in use, threads or time, and never evicts by
itself: its owner asks for victims and removes them. It is not thread-safe; its owner serialises the calls.
"""

from collections.abc import Container, Hashable
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """The order of eviction over *candidates*: known keys that are not held.

    A key is unknown, a candidate or held. Holding and releasing a key keeps whatever history the policy has of it,
    so that a pin never makes a block look new. What a policy remembers of removed keys is its own affair and bounded
    by the capacity it was made with.
    """

    def insert(self, key: K) -> None:
        """Learn a key that is unknown; it becomes the most recently used candidate. Cost: O(1)."""
        ...

    def touch(self, key: K) -> None:
        """Count one use of a candidate; no effect on held and unknown keys. Cost: O(1)."""
        ...

    def hold(self, key: K) -> None:
        """Take a known key out of the candidates, because it is pinned. Twice is fine. Cost: O(1)."""
        ...

    def release(self, key: K) -> None:
        """Make a known key a candidate again, the most recently used one. Cost: O(1)."""
        ...

    def remove(self, key: K) -> None:
        """Forget a key, candidate or held; an unknown one is no error. Cost: O(1)."""
        ...

    def victims(self, n: int, keep: Container[K]) -> list[K]:
        """The first *n* candidates in eviction order that are not in *keep*; fewer if there are fewer.

        Removes nothing. Cost: O(n + candidates passed over because they are in *keep*), never the number held.
        """
        ...

    def __len__(self) -> int:
        """How many candidates there are."""
        ...
