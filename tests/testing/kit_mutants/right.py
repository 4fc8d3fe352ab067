"""Tiers that keep every rule, of the kinds that the mutants break: they pass the whole kit."""

import ctypes
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvtier_core.errors import TierOpenError
from kvtier_core.hookspecs import hookimpl
from kvtier_core.keys import OffloadKey
from kvtier_core.tier import BlockTier, TierSettings
from kvtier_core.values import BlockInfo, JobResult, TierInfo
from kvtier_testing.faulty import FaultyTier


class RootSettings(TierSettings):
    root: Path


class Folder(BlockTier):
    """A file a block, shared by whoever has the folder."""

    Settings = RootSettings
    info = TierInfo(medium="disk", shared=True, persistent=True)
    transient = ()
    settings: RootSettings

    @property
    def folder(self) -> Path:
        return self.settings.root / self.context.namespace

    def path(self, key: OffloadKey) -> Path:
        return self.folder / key.hex()

    def open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TierOpenError(f"can't make {self.folder}: {error}; set root to a folder") from error

    def contains(self, keys):
        return [self.path(key).exists() for key in keys]

    def holds(self, keys):
        return self.contains(keys)

    def store(self, key, block):
        draft = self.folder / f".{secrets.token_hex(8)}"
        draft.write_bytes(block)
        draft.rename(self.path(key))

    def load(self, key, into):
        try:
            into[:] = self.path(key).read_bytes()
        except FileNotFoundError:
            return False
        return True

    def store_many(self, keys, blocks):
        for key, block in zip(keys, blocks, strict=True):
            self.store(key, block)
        return [True] * len(keys)

    def load_many(self, keys, intos):
        return [self.load(key, into) for key, into in zip(keys, intos, strict=True)]

    def delete(self, keys):
        for key in keys:
            self.path(key).unlink(missing_ok=True)

    def scan(self) -> Iterator[BlockInfo]:
        for file in self.folder.glob("[!.]*"):
            status = file.stat()
            used = status.st_atime if status.st_atime > status.st_mtime + 1 else None
            yield BlockInfo(
                key=OffloadKey(bytes.fromhex(file.name)),
                bytes=status.st_size,
                time=status.st_mtime,
                used=used,
            )

    def mark_used(self, marks):
        for key, used in marks.items():
            if self.path(key).exists():
                os.utime(self.path(key), (used, self.path(key).stat().st_mtime))

    def remove_namespace(self):
        for file in self.folder.iterdir():
            file.unlink()

    def close(self) -> None:
        pass


class SelfBounded(BlockTier):
    """Keeps its own capacity and ttl."""

    info = TierInfo(medium="memory", bounded_by="tier", ttl_by="tier")
    transient = ()

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.lock = threading.Lock()
        self.blocks: dict[OffloadKey, tuple[float, bytes]] = {}

    @property
    def ttl(self) -> float:
        return float("inf") if self.settings.ttl is None else self.settings.ttl

    def open(self) -> None:
        pass

    def is_young(self, key) -> bool:
        found = self.blocks.get(key)
        return found is not None and time.monotonic() < found[0] + self.ttl

    def contains(self, keys):
        return [self.is_young(key) for key in keys]

    def store(self, key, block):
        with self.lock:
            self.blocks.pop(key, None)
            self.make_room()
            self.blocks[key] = time.monotonic(), bytes(block)

    def make_room(self) -> None:
        capacity = self.context.capacity_bytes
        while capacity is not None and (len(self.blocks) + 1) * self.context.row_bytes > capacity:
            oldest = next(iter(self.blocks))
            del self.blocks[oldest]
            self.context.report_evicted([oldest])

    def load(self, key, into):
        if not self.is_young(key):
            return False
        into[:] = self.blocks[key][1]
        return True

    def delete(self, keys):
        for key in keys:
            self.blocks.pop(key, None)

    def close(self) -> None:
        pass


class HookSettings(TierSettings):
    root: Path


STORAGES: dict[Path, dict[str, dict[OffloadKey, bytes]]] = {}


class HookStore(FaultyTier):
    """A storage service in this process, shared by all that name its root."""

    Settings = HookSettings
    info = TierInfo(medium="remote", shared=True, persistent=True, bounded_by="storage")
    storages: ClassVar[dict[Path, dict[str, dict[OffloadKey, bytes]]]] = STORAGES

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.blocks = self.storages.setdefault(settings.root, {})
        self.blocks.setdefault(context.namespace, {})

    @hookimpl
    def on_open(self, pool):
        if self.settings.root.parent.is_file():  # type: ignore[attr-defined]
            raise TierOpenError("nobody listens there; set root to a service")


class PoolTier(FaultyTier):
    """Moves rows by their place in the pool, as a client that registers memory does."""

    pool: Any = None

    @hookimpl
    def on_open(self, pool):
        self.pool = pool

    def row(self, number: int) -> memoryview:
        stride = self.pool.row_stride
        raw = (ctypes.c_char * stride).from_address(self.pool.address + number * stride)
        return memoryview(raw).cast("B")

    def moved(self, job) -> Sequence[int]:
        return job.rows

    def _carry_out(self, kind, job, namespace):
        if kind == "lookup":
            return super()._carry_out(kind, job, namespace)
        blocks, missing = self.blocks[namespace], []
        for key, row in zip(job.keys, self.moved(job), strict=True):
            if kind == "store":
                blocks[key] = bytes(self.row(row))
            elif key in blocks:
                self.row(row)[:] = blocks[key]
            else:
                missing.append(key)
        return JobResult(job_id=job.id, missing=missing)


class BoundedHooks(FaultyTier):
    """Keeps its own capacity and ttl, and reports what it holds."""

    info = TierInfo(medium="memory", bounded_by="tier", ttl_by="tier", reports_contents=True)

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.times: dict[OffloadKey, float] = {}
        self.ttl = float("inf") if settings.ttl is None else settings.ttl

    @property
    def most(self) -> int:
        capacity = self.context.capacity_bytes
        return 1 << 30 if capacity is None else capacity // self.context.row_bytes

    def _carry_out(self, kind, job, namespace):
        blocks, now = self.blocks[namespace], time.monotonic()
        self.drop(blocks, [key for key in blocks if self.times[key] + self.ttl <= now])
        if kind == "store":
            self.times.update(dict.fromkeys(job.keys, now))
            for key in job.keys:
                blocks.pop(key, None)  # it is the youngest again
        result = super()._carry_out(kind, job, namespace)
        self.drop(blocks, list(blocks)[: max(0, len(blocks) - self.most)])
        return result

    def drop(self, blocks, keys) -> None:
        for key in keys:
            del blocks[key]
        self.context.report_evicted(keys)


RIGHT = (Folder, SelfBounded, HookStore, PoolTier, BoundedHooks)
