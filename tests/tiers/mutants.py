"""Tiers that each break one rule. Collected by ``test_kit`` in a process of its own: every one of them must fail.

The name of a test class ends in the name of its mutant; ``KILLED_BY`` says which test must fail for it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from kvtier_core.hookspecs import hookimpl
from kvtier_core.keys import OffloadKey
from kvtier_core.testing import driving
from kvtier_core.testing.faulty import FaultyTier
from kvtier_core.testing.tiers import TierTests
from kvtier_core.values import BlockInfo, JobResult, TierInfo
from kvtier_disk import DiskTier
from kvtier_disk.layout import FileLayout
from kvtier_memory import MemoryTier

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


class ScanForgets(DiskTier):
    def scan(self):
        return list(super().scan())[1:]


class NamespaceBlind(DiskTier):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        self._layout = FileLayout(settings.root / "all", context.row_bytes)


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


class DiskRulesFor(TierTests):
    @pytest.fixture
    def tier_settings(self, tmp_path):
        return {"root": tmp_path}


KILLED_BY: dict[type[Any], str] = {
    ShortKeys: "test_c52_keys_that_differ_in_their_last_bytes_are_apart",
    GroupBlind: "test_k12_o1_groups_of_one_block_hash_are_apart",
    SharedDict: "test_k13_o4_instances_share_nothing",
    KeepsReference: "test_c29_a_store_keeps_no_reference_to_its_buffer",
    AbsentIsFault: "test_c52_contains_and_load_agree_and_absence_is_no_fault",
    AnswersWithInts: "test_c52_contains_and_load_agree_and_absence_is_no_fault",
    DeletesNothing: "test_c52_delete_removes_what_is_named_and_nothing_else",
    KeepsFirst: "test_c52_a_later_store_replaces_the_block",
    HalfLoad: "test_c29_rows_come_back_whole_and_proven",
    DropsProof: "test_c29_rows_come_back_whole_and_proven",
    Forgetful: "test_k7_o1_a_persistent_tier_has_its_blocks_after_a_restart",
    ScanForgets: "test_c52_scan_finds_every_block_once",
    NamespaceBlind: "test_c02_namespaces_are_apart",
    WritesLate: "test_c29_buffers_are_left_alone_after_the_result",
    ResultTwice: "test_c30_every_job_has_exactly_one_result",
    NothingForEmptyJobs: "test_c30_every_job_has_exactly_one_result",
    ShortLookup: "test_c10_a_lookup_has_one_bool_a_key_in_order",
    ResetKeeps: "test_k7_o4_c34_after_a_reset_everything_misses",
    InFlightSurfaces: "test_k7_o4_c34_after_a_reset_everything_misses",
    MissingAsFailed: "test_c30_absent_keys_are_missing_and_not_failed",
    CancelForgets: "test_c30_cancelled_jobs_have_their_result",
}


def _make(mutant: type[Any]) -> type[TierTests]:
    def tier_class(self):
        return mutant

    base = DiskRulesFor if issubclass(mutant, DiskTier) else TierTests
    return type(f"Test{mutant.__name__}", (base,), {"tier_class": pytest.fixture(tier_class)})


for _mutant in KILLED_BY:
    globals()[f"Test{_mutant.__name__}"] = _make(_mutant)
