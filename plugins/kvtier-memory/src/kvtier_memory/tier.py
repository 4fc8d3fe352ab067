"""Keeps blocks as bytes in a dictionary of its own; never shared with another instance, never written anywhere."""

import time
from collections.abc import Sequence

from kvtier_core.tier import BlockTier, Duration, OffloadKey, TierContext, TierInfo, TierSettings


class MemorySettings(TierSettings):
    """``[tiers.NAME]`` with ``type = "memory"``."""

    latency: Duration = 0.0
    """Seconds that every call takes on top, to stand in for a slower medium."""


class MemoryTier(BlockTier):
    """Real bytes in process memory, kept within ``capacity`` by the core (1 GiB where it is unset)."""

    Settings = MemorySettings
    info = TierInfo(medium="memory", default_capacity=1 << 30)

    settings: MemorySettings

    def __init__(self, settings: MemorySettings, context: TierContext) -> None:
        """Keep both. The dictionary belongs to this instance alone."""
        super().__init__(settings, context)
        # Calls come from several threads, never two on one key; single operations of a dict are thread-safe.
        self._blocks: dict[OffloadKey, bytes] = {}

    def open(self) -> None:
        """Nothing to make ready."""

    def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Which of *keys* are stored."""
        self._wait()
        return [key in self._blocks for key in keys]

    def store(self, key: OffloadKey, block: memoryview) -> None:
        """Keep a copy: the buffer is the core's again when this returns."""
        self._wait()
        self._blocks[key] = bytes(block)

    def load(self, key: OffloadKey, into: memoryview) -> bool:
        """Copy the block out. Raises ``ValueError`` when *into* is not as large as the block."""
        self._wait()
        block = self._blocks.get(key)
        if block is None:
            return False
        into[:] = block
        return True

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Forget these blocks."""
        self._wait()
        for key in keys:
            self._blocks.pop(key, None)

    def close(self) -> None:
        """Free the memory."""
        self._blocks.clear()

    def _wait(self) -> None:
        if self.settings.latency:
            time.sleep(self.settings.latency)
