"""The keys that both sides of the hot-path benchmark work on. Plain Python: it also runs in vLLM's interpreter.

Every round gets fresh key objects, as from an engine that hashes a prompt anew: equal to the stored ones, never the
same, and with no hash computed yet.
"""

import random
from collections.abc import Sequence

KEY_BYTES = 36
"""A block hash of 32 bytes and the group's index."""


class Keys:
    """*num_blocks* keys of a full pool, and rounds of them in random order; a seed makes both sides' equal."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.resident = [self._new() for _ in range(num_blocks)]

    def _new(self) -> bytes:
        return self.random.randbytes(KEY_BYTES - 4) + bytes(4)

    def some_resident(self, count: int) -> list[bytes]:
        """Keys that are in the pool, in random order."""
        return copies(self.random.sample(self.resident, count))

    def absent(self, count: int) -> list[bytes]:
        """Keys that nobody has ever seen."""
        return [self._new() for _ in range(count)]


def copies(keys: Sequence[bytes]) -> list[bytes]:
    """Equal keys in other objects."""
    return [bytes(bytearray(key)) for key in keys]
