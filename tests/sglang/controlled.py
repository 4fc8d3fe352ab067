"""A tier in SGLang's process that a test in another one makes slow, wrong or broken, by files in its directory."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvtier_core.tier import BlockInfo, BlockTier, OffloadKey, TierInfo, TierSettings

_POLL_S = 0.01


class Settings(TierSettings):
    """Where it is."""

    root: str


class ControlledTier(BlockTier):
    """A file a block. While ``hang`` is there loads wait, ``flip`` changes a bit of each, ``fail`` fails all calls."""

    Settings: ClassVar[type[TierSettings]] = Settings
    info = TierInfo(medium="disk", persistent=True, bounded_by="storage")

    def __init__(self, settings: Any, context: Any) -> None:
        super().__init__(settings, context)
        self._control = Path(settings.root)
        self._blocks = self._control / context.namespace

    def open(self) -> None:
        self._blocks.mkdir(parents=True, exist_ok=True)

    def scan(self) -> Iterable[BlockInfo]:
        for file in self._blocks.iterdir():
            found = file.stat()
            yield BlockInfo(
                key=OffloadKey(bytes.fromhex(file.name)), bytes=found.st_size, time=found.st_mtime
            )

    def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return [(self._blocks / key.hex()).exists() for key in keys]

    def store(self, key: OffloadKey, block: memoryview) -> None:
        self._fail()
        (self._blocks / key.hex()).write_bytes(block)

    def load(self, key: OffloadKey, into: memoryview) -> bool:
        self._fail()
        while (self._control / "hang").exists():
            time.sleep(_POLL_S)
        file = self._blocks / key.hex()
        if not file.exists():
            return False
        into[:] = file.read_bytes()
        if (self._control / "flip").exists():
            into[7] ^= 1
        return True

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            (self._blocks / key.hex()).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open."""

    def _fail(self) -> None:
        if (self._control / "fail").exists():
            raise OSError("told to fail")
