"""Broken tiers on the blocking interface: what their methods answer, keep and do."""

import ctypes
import errno
import os
import socket
import threading
import time
from typing import Any, ClassVar

from kvtier_core.keys import OffloadKey
from kvtier_core.values import BlockInfo, TierInfo
from kvtier_memory import MemoryTier
from tests.testing.kit_mutants.right import Folder
from tests.testing.kit_mutants.table import HANGS, killed_by

AGREE = "test_c52_contains_and_load_agree_and_absence_is_no_fault"
REPLACE = "test_c52_a_later_store_replaces_the_block"
DELETE = "test_c52_delete_removes_what_is_named_and_nothing_else"
SCAN = "test_c52_scan_finds_every_block_once"
MARKS = "test_c52_marks_are_told_again_by_scan"
BATCHES = "test_c52_batches_answer_key_by_key"
WHOLE = "test_c29_rows_come_back_whole_and_proven"
CONSTRUCTOR = "test_c52_the_constructor_does_no_io"
UNOPENED = "test_c34_a_tier_that_was_never_opened_can_be_closed"
CLOSED = "test_c34_what_was_opened_is_closed"
SAYS_SO = "test_c33_a_tier_that_cannot_open_says_so"
CLASS = "test_c51_the_class_is_a_tier_type"
LATE = "test_c29_a_load_writes_nothing_after_its_return"


# Keys and bytes.


@killed_by("test_c52_keys_that_differ_in_their_last_bytes_are_apart", "the lookup of absent and stored keys")
class ShortKeys(MemoryTier):
    def store(self, key, block):
        super().store(OffloadKey(key[:31]), block)

    def load(self, key, into):
        return super().load(OffloadKey(key[:31]), into)

    def contains(self, keys):
        return [key[:31] in self._blocks for key in keys]

    info = TierInfo(medium="memory", bounded_by="tier", persistent=True)


@killed_by("test_c02_groups_of_one_block_hash_are_apart", "the loaded rows")
class GroupBlind(MemoryTier):
    def store(self, key, block):
        super().store(OffloadKey(key[:-4]), block)

    def load(self, key, into):
        return super().load(OffloadKey(key[:-4]), into)


@killed_by("test_c02_instances_without_storage_share_nothing", "the keys that the load reported missing")
class SharedDict(MemoryTier):
    everybody: ClassVar[dict[OffloadKey, bytes]] = {}
    info = TierInfo(medium="memory", bounded_by="tier")

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self._blocks = self.everybody

    def scan(self):
        return [BlockInfo(key=key, bytes=len(block), time=0.0) for key, block in self._blocks.items()]


@killed_by(REPLACE, "load raised ValueError: operation forbidden on released memoryview")
class KeepsReference(MemoryTier):
    def store(self, key, block):
        self._blocks[key] = block


@killed_by("test_c29_a_store_keeps_no_reference_to_its_buffer", "the loaded rows: 3 of 3 are wrong")
class KeepsSlice(MemoryTier):
    def store(self, key, block):
        self._blocks[key] = block[:]


@killed_by(WHOLE, "the loaded rows: 5 of 5 are wrong")
class HalfLoad(MemoryTier):
    def load(self, key, into):
        if key not in self._blocks:
            return False
        into[: len(into) // 2] = self._blocks[key][: len(into) // 2]
        return True


@killed_by(WHOLE, "the loaded rows: 5 of 5 are wrong")
class DropsProof(MemoryTier):
    def store(self, key, block):
        super().store(key, memoryview(bytes(block[:-64]) + bytes(64)))


# Answers.


@killed_by(WHOLE, "in store: raise OSError(errno.ENOSPC")
class NoRoom(MemoryTier):
    """Nothing that the rule's advice speaks of."""

    def store(self, key, block):
        raise OSError(errno.ENOSPC, "no room")


@killed_by(AGREE, "in load: into[:] = self._blocks[key]")
class AbsentIsFault(MemoryTier):
    def load(self, key, into):
        into[:] = self._blocks[key]
        return True


@killed_by(AGREE, "holds, with every other key stored")
class HoldsAll(MemoryTier):
    def holds(self, keys):
        return [True] * len(keys)


@killed_by(AGREE, "contains answered a key with 1: it answers with True or False")
class AnswersWithInts(MemoryTier):
    def contains(self, keys):
        return [int(key in self._blocks) for key in keys]


@killed_by(AGREE, "contains returned 100 answers for 256 keys")
class AnswersInPart(MemoryTier):
    def contains(self, keys):
        return [key in self._blocks for key in keys[:100]]


@killed_by(AGREE, "contains returned set: it returns a sequence, one bool a key")
class AnswersWithSet(MemoryTier):
    def contains(self, keys):
        return {key for key in keys if key in self._blocks}


@killed_by(AGREE, "load returned 8192: it returns True or False")
class LoadsByCount(MemoryTier):
    def load(self, key, into):
        return len(into) if super().load(key, into) else False


@killed_by(REPLACE, "store returned True: it returns None")
class StoreSaysTrue(MemoryTier):
    def store(self, key, block):
        super().store(key, block)
        return True


@killed_by(REPLACE, "the block after a later store")
class KeepsFirst(MemoryTier):
    def store(self, key, block):
        self._blocks.setdefault(key, bytes(block))


@killed_by(REPLACE, "store raised RuntimeError: UNIQUE constraint failed")
class StoresOnce(MemoryTier):
    def store(self, key, block):
        if key in self._blocks:
            raise RuntimeError("UNIQUE constraint failed")
        super().store(key, block)


@killed_by(DELETE, "contains after the deletions")
class DeletesNothing(MemoryTier):
    def delete(self, keys):
        pass


@killed_by(DELETE, "delete raised KeyError")
class DeleteRaises(MemoryTier):
    def delete(self, keys):
        for key in keys:
            del self._blocks[key]


@killed_by(DELETE, "contains after the deletions")
class DeletesByPrefix(MemoryTier):
    def delete(self, keys):
        for key in keys:
            for other in [other for other in self._blocks if other[:28] == key[:28]]:
                del self._blocks[other]


@killed_by("test_c52_close_twice_is_fine", "close raised AttributeError")
class ClosesOnce(MemoryTier):
    client: Any = None

    def open(self):
        self.client = threading.Lock()

    def close(self):
        self.client.locked()
        del self.client
        self.client = None


# Time.


@killed_by(AGREE, "load did not return within 2 s", patience_s=HANGS)
class HangsInLoad(MemoryTier):
    def load(self, key, into):
        threading.Event().wait()


@killed_by(WHOLE, "no result of the store 1 within 2 s", patience_s=HANGS)
class HangsInStore(MemoryTier):
    def store(self, key, block):
        threading.Event().wait()


@killed_by(WHOLE, "the tier's constructor, open or scan did not return within 2 s", patience_s=HANGS)
class HangsInOpen(MemoryTier):
    def open(self):
        threading.Event().wait()


@killed_by(CLOSED, "close or shutdown did not return within 2 s", patience_s=HANGS)
class HangsInClose(MemoryTier):
    def close(self):
        threading.Event().wait()


@killed_by(SCAN, "scan did not return within 2 s", patience_s=HANGS)
class HangsInScan(Folder):
    def scan(self):
        yield from super().scan()
        threading.Event().wait()


@killed_by(SCAN, "blocks and did not end")
class EndlessScan(Folder):
    def scan(self):
        while True:
            yield BlockInfo(key=OffloadKey(b"k" * 36), bytes=8192, time=time.time())


# Memory.


@killed_by(LATE, "after the result of a load, whose row it was")
class LoadsLate(MemoryTier):
    """As a client that is given a native pointer, and goes on after its caller has given up."""

    def load(self, key, into):
        address = ctypes.addressof(ctypes.c_char.from_buffer(into))
        threading.Timer(0.05, lambda: ctypes.memset(address, 1, 64)).start()
        return super().load(key, into)


@killed_by(LATE, "after the result of a load, whose row it was")
class LoadsAbsentLate(MemoryTier):
    def load(self, key, into):
        if super().load(key, into):
            return True
        address = ctypes.addressof(ctypes.c_char.from_buffer(into))
        threading.Timer(0.05, lambda: ctypes.memset(address, 1, 64)).start()
        return False


@killed_by("test_c29_only_the_rows_of_a_job_are_touched", "which lies beside the rows of jobs")
class LoadsTooMuch(MemoryTier):
    def load(self, key, into):
        is_there = super().load(key, into)
        if is_there:
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(into)) + len(into), 1, 8)
        return is_there


# Optional abilities.


@killed_by(CLASS, "did you mean 'scan'?")
class MisspeltScan(MemoryTier):
    def scn(self):
        return ()


@killed_by(CLASS, "did you mean 'store_many'?")
class MisspeltBatch(MemoryTier):
    def store_mny(self, keys, blocks):
        return [True] * len(keys)


@killed_by("test_c52_an_optional_ability_is_whole", "of follow and follow_interval one is missing")
class NoInterval(Folder):
    def follow(self):
        pass


@killed_by(BATCHES, "what load_many gave, None for absent keys")
class BatchOutOfOrder(Folder):
    def load_many(self, keys, intos):
        return sorted(super().load_many(keys, intos))


@killed_by(BATCHES, "store_many returned 3 answers for 4 keys")
class BatchAnswersShort(Folder):
    def store_many(self, keys, blocks):
        return super().store_many(keys, blocks)[1:]


@killed_by(BATCHES, "the blocks after a later store_many")
class BatchKeepsFirst(Folder):
    def store_many(self, keys, blocks):
        for key, block in zip(keys, blocks, strict=True):
            if not self.path(key).exists():
                self.store(key, block)
        return [True] * len(keys)


@killed_by(MARKS, "mark_used changed the time of the store")
class MarksAge(Folder):
    def mark_used(self, marks):
        super().mark_used(marks)
        for key, used in marks.items():
            if self.path(key).exists():
                os.utime(self.path(key), (used, used - 60))


@killed_by(MARKS, "scan does not say when a block was used")
class ForgetsMarks(Folder):
    def mark_used(self, marks):
        pass


@killed_by(MARKS, "mark_used raised FileNotFoundError")
class MarksAbsent(Folder):
    def mark_used(self, marks):
        for key in marks:
            self.path(key).stat()


# Life.


@killed_by(CONSTRUCTOR, "the constructor did I/O: socket.bind")
class ListensInConstructor(MemoryTier):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))


@killed_by(CONSTRUCTOR, "the constructor did I/O: os.mkdir")
class WritesInConstructor(Folder):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        (settings.root / str(time.monotonic_ns())).mkdir(parents=True)


@killed_by(UNOPENED, "AttributeError")
class CloseNeedsOpen(Folder):
    def open(self):
        super().open()
        self.files: list[Any] = []

    def close(self):
        self.files.clear()


@killed_by(CLOSED, "opened and closed 3 times, the tier left 3 of each: ", patience_s=HANGS)
class LeavesFiles(Folder):
    def open(self):
        super().open()
        self.file = (self.settings.root / "log").open("w")


@killed_by(CLOSED, "the tier left 3 of each: thread heartbeat", patience_s=HANGS)
class LeavesThreads(MemoryTier):
    def open(self):
        threading.Thread(target=threading.Event().wait, name="heartbeat", daemon=True).start()


@killed_by(
    SAYS_SO,
    "open raised what only its author understands: tier 'kit' could not be opened: NotADirectoryError",
)
class RaisesItsOwn(Folder):
    def open(self):
        self.folder.mkdir(parents=True, exist_ok=True)


@killed_by(SAYS_SO, "open returned, though with unusable_settings it can't work")
class OpensWhatever(Folder):
    def open(self):
        pass


class ConnectionError(Exception):  # noqa: A001 - as clients do
    """A client's own, and none of Python's."""


@killed_by(
    "test_c52_the_clients_own_transient_exceptions_are_named",
    "ConnectionError: the class does not say whether",
)
class UnnamedTransient(MemoryTier):
    def store(self, key, block):
        if not block:
            raise ConnectionError
        super().store(key, block)
