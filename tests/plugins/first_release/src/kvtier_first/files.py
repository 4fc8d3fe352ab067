"""On the blocking interface: a file a block, in a directory that several engines share."""

import os
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import SecretStr

from kvtier_core import TierOpenError
from kvtier_core.tier import (
    BlockInfo,
    BlockTier,
    Duration,
    OffloadKey,
    Size,
    SupportsBatch,
    SupportsFollow,
    SupportsHolds,
    SupportsMarks,
    SupportsRemoval,
    SupportsScan,
    Threads,
    TierContext,
    TierInfo,
    TierSettings,
    format_size,
    is_of_one_process,
    mask_text,
)


class FilesSettings(TierSettings):
    root: Path
    chunk: Size = 1 << 20
    refresh: Duration = 0.1
    password: SecretStr | None = None
    threads: Threads = 3


class FilesTier(BlockTier):
    Settings = FilesSettings
    info = TierInfo(
        medium="disk", shared=True, persistent=True, default_capacity=1 << 30, store_batch=2, load_batch=2
    )
    transient = (InterruptedError,)
    settings: FilesSettings

    @classmethod
    def for_settings(cls, settings: TierSettings) -> type[BlockTier]:
        return cls

    def __init__(self, settings: FilesSettings, context: TierContext) -> None:
        super().__init__(settings, context)
        self.follow_interval = settings.refresh
        self.folder = settings.root / context.namespace
        self.reported: set[OffloadKey] = set()
        self.lock = threading.Lock()

    def open(self) -> None:
        self.is_short_lived = is_of_one_process(self.context.description)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TierOpenError(mask_text(f"{error}; set root to a directory that can be made")) from error
        self.context.log.debug("blocks of %s", format_size(self.context.row_bytes))

    def path(self, key: OffloadKey) -> Path:
        return self.folder / key.hex()

    def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool | Exception]:
        return [self.path(key).exists() for key in keys]

    def holds(self, keys: Sequence[OffloadKey]) -> Sequence[bool | Exception]:
        return self.contains(keys)

    def store(self, key: OffloadKey, block: memoryview) -> None:
        draft = self.folder / f".{secrets.token_hex(8)}"
        draft.write_bytes(block)
        draft.rename(self.path(key))

    def load(self, key: OffloadKey, into: memoryview) -> bool:
        try:
            into[:] = self.path(key).read_bytes()
        except FileNotFoundError:
            return False
        return True

    def store_many(
        self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
    ) -> Sequence[bool | Exception]:
        for key, block in zip(keys, blocks, strict=True):
            self.store(key, block)
        return [True] * len(keys)

    def load_many(
        self, keys: Sequence[OffloadKey], intos: Sequence[memoryview]
    ) -> Sequence[bool | Exception]:
        return [self.load(key, into) for key, into in zip(keys, intos, strict=True)]

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.path(key).unlink(missing_ok=True)

    def scan(self) -> Iterable[BlockInfo]:
        for file in self.folder.glob("[!.]*"):
            try:
                status = file.stat()
            except FileNotFoundError:
                continue
            used = status.st_atime if status.st_atime > status.st_mtime + 1 else None
            key = OffloadKey(bytes.fromhex(file.name))
            yield BlockInfo(key=key, bytes=status.st_size, time=status.st_mtime, used=used)

    def follow(self) -> None:
        with self.lock:
            there = {block.key for block in self.scan()}
            self.context.report_stored(sorted(there - self.reported))
            self.context.report_evicted(sorted(self.reported - there))
            self.reported = there

    def mark_used(self, marks: Mapping[OffloadKey, float]) -> None:
        for key, used in marks.items():
            if self.path(key).exists():
                os.utime(self.path(key), (used, self.path(key).stat().st_mtime))

    def remove_namespace(self) -> None:
        for file in self.folder.iterdir():
            file.unlink()
        self.folder.rmdir()

    def close(self) -> None:
        self.reported = set()


ABILITIES = (SupportsBatch, SupportsFollow, SupportsHolds, SupportsMarks, SupportsRemoval, SupportsScan)
