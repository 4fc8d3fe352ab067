"""Tiers that each break one rule: ``test_kit`` runs this file in a process of its own.

It also says which test must fail for which tier. The test class of each is called ``Test`` and its name.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from kvtier_core.hookspecs import hookimpl
from kvtier_core.keys import OffloadKey
from kvtier_core.values import BlockInfo, JobResult, TierInfo
from kvtier_disk import FilesTier
from kvtier_disk.folder import Folder
from kvtier_disk.layout import FileLayout
from kvtier_memory import MemoryTier
from kvtier_testing import driving
from kvtier_testing.faulty import FaultyTier
from kvtier_testing.tiers import TierTests

driving.PATIENCE_S = 0.3  # a missing result is meant here


class ShortKeys(MemoryTier):
    def store(self, key, block):
        super().store(OffloadKey(key[:31]), block)

    def load(self, key, into):
        return super().load(OffloadKey(key[:31]), into)


class GroupBlind(MemoryTier):
    def store(self, key, block):
        super().store(OffloadKey(key[:-4]), block)

    def load(self, key, into):
        return super().load(OffloadKey(key[:-4]), into)


class SharedDict(MemoryTier):
    everybody: ClassVar[dict[OffloadKey, bytes]] = {}

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self._blocks = self.everybody

    def contains(self, keys):
        return [key in self._blocks for key in keys]

    info = TierInfo(medium="memory", bounded_by="tier")

    def scan(self):
        return [BlockInfo(key=key, bytes=len(block), time=0.0) for key, block in self._blocks.items()]


class KeepsReference(MemoryTier):
    def store(self, key, block):
        self._blocks[key] = block


class AbsentIsFault(MemoryTier):
    def load(self, key, into):
        into[:] = self._blocks[key]
        return True


class HoldsAll(MemoryTier):
    def holds(self, keys):
        return [True] * len(keys)


class AnswersWithInts(MemoryTier):
    def contains(self, keys):
        return [int(key in self._blocks) for key in keys]


class DeletesNothing(MemoryTier):
    def delete(self, keys):
        pass


class KeepsFirst(MemoryTier):
    def store(self, key, block):
        self._blocks.setdefault(key, bytes(block))


class HalfLoad(MemoryTier):
    def load(self, key, into):
        if key not in self._blocks:
            return False
        into[: len(into) // 2] = self._blocks[key][: len(into) // 2]
        return True


class DropsProof(MemoryTier):
    def store(self, key, block):
        super().store(key, memoryview(bytes(block[:-64]) + bytes(64)))


class Forgetful(MemoryTier):
    info = TierInfo(medium="memory", persistent=True)

    def scan(self):
        return ()


class ScanForgets(FilesTier):
    def scan(self):
        return list(super().scan())[1:]


class ScanSaysNow(FilesTier):
    def scan(self):
        return [replace(block, time=time.time()) for block in super().scan()]


class NamespaceBlind(FilesTier):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        self._layout = FileLayout(Folder(settings.root), "all", context.row_bytes, context.log.warning)


class WritesLate(FaultyTier):
    late: Sequence[memoryview] = ()

    @hookimpl
    def submit_load(self, job):
        super().submit_load(job)
        self.late = job.buffers

    @hookimpl
    def submit_store(self, job):
        super().submit_store(job)
        for buffer in self.late:
            buffer[:1] = b"!"


class ResultTwice(FaultyTier):
    @hookimpl
    def get_finished_jobs(self):
        return [result for result in super().get_finished_jobs() for _ in range(2)]


class NothingForEmptyJobs(FaultyTier):
    @hookimpl
    def submit_store(self, job):
        if job.keys:
            super().submit_store(job)


class ShortLookup(FaultyTier):
    @hookimpl
    def lookup(self, job):
        return [key in self.blocks[self.namespace] for key in dict.fromkeys(job.keys)]


class ResetKeeps(FaultyTier):
    @hookimpl
    def reset(self, namespace, description):
        pass


class InFlightSurfaces(FaultyTier):
    """Carries stores out when their results are fetched, in whatever namespace is then served."""

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.waiting: list[Any] = []

    @hookimpl
    def submit_store(self, job):
        self.waiting.append(job)

    @hookimpl
    def get_finished_jobs(self):
        while self.waiting:
            super().submit_store(self.waiting.pop())
        return super().get_finished_jobs()


class MissingAsFailed(FaultyTier):
    @hookimpl
    def get_finished_jobs(self):
        return [
            JobResult(job_id=result.job_id, present=result.present, failed=result.missing)
            for result in super().get_finished_jobs()
        ]


class CancelForgets(FaultyTier):
    @hookimpl
    def cancel_jobs(self, job_ids):
        self._results = [result for result in self._results if result.job_id not in job_ids]


class DiscardsNothing(FaultyTier):
    @hookimpl
    def discard(self, keys):
        pass


class ReportsNoEviction(FaultyTier):
    """Holds six blocks and reports what was stored alone."""

    info = TierInfo(medium="memory", bounded_by="tier", reports_contents=True)

    @hookimpl
    def submit_store(self, job):
        super().submit_store(job)
        blocks = self.blocks[self.namespace]
        for key in list(blocks)[:-6]:
            del blocks[key]


class DiskRulesFor(TierTests):
    @pytest.fixture
    def tier_settings(self, tmp_path):
        return {"root": tmp_path}


def _make(mutant: type[Any]) -> type[TierTests]:
    def tier_class(self):
        return mutant

    base = DiskRulesFor if issubclass(mutant, FilesTier) else TierTests
    return type(f"Test{mutant.__name__}", (base,), {"tier_class": pytest.fixture(tier_class)})


for _mutant in [
    one for one in globals().copy().values() if isinstance(one, type) and one.__module__ == __name__
]:
    if not issubclass(_mutant, TierTests):
        globals()[f"Test{_mutant.__name__}"] = _make(_mutant)
