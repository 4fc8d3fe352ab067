"""Broken tiers on the blocking interface: restarts, namespaces, other instances, capacity and age."""

import shutil
import time
from dataclasses import replace

from kvtier_core.keys import OffloadKey
from kvtier_core.values import BlockInfo, TierInfo
from kvtier_disk import FilesTier
from kvtier_disk.folder import Folder as DiskFolder
from kvtier_disk.layout import FileLayout
from kvtier_memory import MemoryTier
from tests.testing.kit_mutants.right import Folder, SelfBounded
from tests.testing.kit_mutants.table import HANGS, killed_by

RESTART = "test_c32_a_persistent_tier_has_its_blocks_after_a_restart"
SCAN = "test_c52_scan_finds_every_block_once"
APART = "test_c02_scan_delete_and_removal_keep_to_their_namespace"
EACH_CHANGE = "test_c52_another_instance_sees_each_change"
BESIDE = "test_c32_a_reader_beside_the_writer_sees_whole_blocks"
CAPACITY = "test_c55_a_tier_that_bounds_itself_keeps_to_its_capacity"


# Restarts.


@killed_by(RESTART, "the lookup of absent and stored keys")
class Forgetful(MemoryTier):
    info = TierInfo(medium="memory", persistent=True)

    def scan(self):
        return ()


@killed_by(SCAN, "the keys that scan found, sorted: 14 of them, not 15")
class ScanForgets(FilesTier):
    def scan(self):
        return list(super().scan())[1:]


@killed_by(SCAN, "scan gives the same block another time each time")
class ScanSaysNow(FilesTier):
    def scan(self):
        return [replace(block, time=time.time()) for block in super().scan()]


@killed_by(SCAN, "the keys that scan found, sorted: 30 of them, not 15")
class ScansTwice(Folder):
    def scan(self):
        return [block for block in super().scan() for _ in range(2)]


@killed_by(SCAN, "scan says 0 bytes of a row of")
class ScansWithoutSize(Folder):
    def scan(self):
        return [replace(block, bytes=0) for block in super().scan()]


@killed_by(SCAN, "scan found a bytes: it yields BlockInfo")
class ScansKeys(Folder):
    def scan(self):
        return [block.key for block in super().scan()]


# Namespaces.


@killed_by("test_c02_namespaces_are_apart", "the loaded rows: 2 of 3 are wrong")
class NamespaceBlind(FilesTier):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        self._layout = FileLayout(DiskFolder(settings.root), "all", context.row_bytes, context.log.warning)


@killed_by(APART, "of one of two namespaces")
class ScansAll(Folder):
    def scan(self):
        for file in self.settings.root.glob("*/[!.]*"):
            yield BlockInfo(key=OffloadKey(bytes.fromhex(file.name)), bytes=8192, time=file.stat().st_mtime)


@killed_by(APART, "the blocks of another namespace, after a delete of their keys in this one")
class DeletesInAll(Folder):
    def delete(self, keys):
        for key in keys:
            for file in self.settings.root.glob(f"*/{key.hex()}"):
                file.unlink()


@killed_by(APART, "the blocks of another namespace, after remove_namespace of this one")
class FlushesAll(Folder):
    """FLUSHALL."""

    def remove_namespace(self):
        shutil.rmtree(self.settings.root)
        self.settings.root.mkdir()


@killed_by(APART, "contains after remove_namespace")
class RemovesNothing(Folder):
    def remove_namespace(self):
        pass


# Other instances.


@killed_by(EACH_CHANGE, "after another instance stored", patience_s=HANGS)
class PrivateIndex(Folder):
    def open(self):
        super().open()
        self.index = {block.key for block in self.scan()}

    def contains(self, keys):
        return [key in self.index for key in keys]

    def store(self, key, block):
        super().store(key, block)
        self.index.add(key)

    def delete(self, keys):
        super().delete(keys)
        self.index.difference_update(keys)


@killed_by(
    "test_c52_what_one_instance_stores_another_finds",
    "it still does not find what the other",
    patience_s=HANGS,
)
class PrivateIndexBehindTheCore(PrivateIndex):
    pass


@killed_by(EACH_CHANGE, "after another instance deleted", patience_s=HANGS)
class RemembersPresence(Folder):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.known: set[OffloadKey] = set()

    def contains(self, keys):
        self.known.update(key for key in keys if self.path(key).exists())
        return [key in self.known for key in keys]


@killed_by(EACH_CHANGE, "after another instance stored", patience_s=HANGS)
class RemembersAbsence(Folder):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.lacking: set[OffloadKey] = set()

    def contains(self, keys):
        self.lacking.update(key for key in keys if not self.path(key).exists())
        return [key not in self.lacking for key in keys]


@killed_by(
    "test_c52_what_one_instance_removed_another_misses", "a load of removed blocks failed", patience_s=HANGS
)
class RaisesForRemoved(Folder):
    def load(self, key, into):
        into[:] = self.path(key).read_bytes()
        return True


@killed_by(BESIDE, "was read half-written")
class WritesInPlace(Folder):
    def store(self, key, block):
        with self.path(key).open("r+b" if self.path(key).exists() else "wb") as file:
            for begin in range(0, len(block), 1024):
                file.write(block[begin : begin + 1024])
                file.flush()
                time.sleep(0.002)

    def load(self, key, into):
        if not self.path(key).exists():
            return False
        found = self.path(key).read_bytes()
        into[: len(found)] = found
        return True


# Room and age.


@killed_by(CAPACITY, "30 blocks are there, in a capacity of 10")
class IgnoresCapacity(SelfBounded):
    def make_room(self):
        pass


@killed_by(CAPACITY, "in a capacity of 10")
class EvictsSilently(SelfBounded):
    def __init__(self, settings, context):
        super().__init__(settings, replace(context, report_evicted=lambda _keys: None))


@killed_by(CAPACITY, "keys of the job failed")
class RefusesWhenFull(SelfBounded):
    def make_room(self):
        if len(self.blocks) >= 10:
            raise OSError("store full")


@killed_by("test_c55_blocks_older_than_ttl_end", "a block is still served", patience_s=HANGS)
class IgnoresTtl(SelfBounded):
    ttl = float("inf")


@killed_by("test_c55_blocks_younger_than_ttl_stay", "with a ttl of 60 s blocks are gone at once")
class TtlInMilliseconds(SelfBounded):
    @property
    def ttl(self):
        return super().ttl / 1000


@killed_by("test_c13_capacity_is_kept_and_stores_go_on", "of the job failed")
class DeletesWithoutEffect(MemoryTier):
    """Its storage is as full as before."""

    def store(self, key, block):
        if len(self._blocks) >= 10:
            raise OSError("store full")
        super().store(key, block)

    def delete(self, keys):
        pass
