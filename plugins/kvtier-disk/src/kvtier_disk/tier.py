"""The tier a configuration names ``disk``: settings, and what can go wrong when it opens.

How blocks lie on the disk is ``FileLayout``'s; capacity, eviction and threads are the core's.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvtier_core import BlockInfo, BlockTier, OffloadKey, TierContext, TierInfo, TierOpenError, TierSettings
from kvtier_disk.layout import FileLayout


class DiskSettings(TierSettings):
    """``[tiers.NAME]`` with ``type = "disk"``."""

    root: Path
    """Directory that holds the blocks, one directory a namespace below it; made if it is missing."""


class DiskTier(BlockTier):
    """Blocks as files below ``root``, kept within ``capacity`` by the core (16 GiB where it is unset)."""

    Settings = DiskSettings
    info = TierInfo(medium="disk", persistent=True, default_capacity=16 << 30)

    settings: DiskSettings

    def __init__(self, settings: DiskSettings, context: TierContext) -> None:
        """Keep both; no I/O."""
        super().__init__(settings, context)
        self._layout = FileLayout(settings.root.expanduser() / context.namespace, context.row_bytes)

    def open(self) -> None:
        """Make the directories and remove what dead writers left. Raises ``TierOpenError``."""
        try:
            self._layout.open(self.context.description)
        except OSError as error:
            raise TierOpenError(
                f"tier {self.context.name!r} (kvtier-disk): can't write below root {str(self.settings.root)!r}: "
                f"{error.strerror or error}; set root to a directory on a writable local disk"
            ) from error

    def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Which of *keys* are stored. Raises ``OSError``."""
        return [self._layout.has(key) for key in keys]

    def store(self, key: OffloadKey, block: memoryview) -> None:
        """Write one block. Raises ``OSError``, such as ``ENOSPC``, and then it is not there."""
        self._layout.put(key, block)

    def load(self, key: OffloadKey, into: memoryview) -> bool:
        """Read one block. Raises ``OSError`` when it can't be read or its file is too short or too long."""
        return self._layout.get(key, into)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks. Raises ``OSError``."""
        for key in keys:
            self._layout.remove(key)

    def close(self) -> None:
        """Nothing is kept open."""

    def scan(self) -> Iterable[BlockInfo]:
        """Every stored block of the namespace. Raises ``OSError``."""
        return self._layout.scan()
