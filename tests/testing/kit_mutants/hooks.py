"""Broken tiers on the hook specs: jobs, results, rows, room, age and lives."""

import errno
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvtier_core.hookspecs import hookimpl
from kvtier_core.values import JobResult, TierInfo
from kvtier_testing.faulty import FaultyTier
from tests.testing.kit_mutants.right import BoundedHooks, HookStore, PoolTier
from tests.testing.kit_mutants.table import HANGS, killed_by

CLASS = "test_c51_the_class_is_a_tier_type"
WHOLE = "test_c29_rows_come_back_whole_and_proven"
EACH_JOB = "test_c30_every_job_has_exactly_one_result"
LOOKUP = "test_c10_a_lookup_has_one_bool_a_key_in_order"
ONLY_ITS_ROWS = "test_c29_only_the_rows_of_a_job_are_touched"
LEFT_ALONE = "test_c29_rows_are_left_alone_after_the_result"
DISCARDED = "test_c03_discarded_blocks_are_not_handed_out_until_they_are_stored_again"
RESET = "test_c34_after_a_reset_everything_misses"
REPORTS = "test_c10_a_tier_that_reports_its_contents_reports_all_of_them"
CAPACITY = "test_c55_a_tier_that_bounds_itself_keeps_to_its_capacity"


# The class.


@killed_by(CLASS, "the core can't evict from a tier on the hook specs")
class BoundedByNobody(FaultyTier):
    info = TierInfo(medium="memory")


@killed_by(CLASS, "no such hook in kvtier.tiers.v1; did you mean 'discard'?")
class MisspeltHook(FaultyTier):
    @hookimpl
    def discrd(self, keys):
        pass


@killed_by(CLASS, "did you mean 'cancel_jobs'?")
class MisspeltWithoutMarker(FaultyTier):
    def cancel_job(self, job_ids):
        pass


@killed_by(CLASS, "overrides a hook of FaultyTier but lost its marker")
class LostMarker(FaultyTier):
    def reset(self, namespace, description):
        pass


# Jobs and results.


@killed_by(WHOLE, "in submit_store: raise OSError(errno.ENOSPC")
class NoRoomOnTheHooks(FaultyTier):
    @hookimpl
    def submit_store(self, job):
        raise OSError(errno.ENOSPC, "no room")


@killed_by(EACH_JOB, "a result that is not due")
class ResultTwice(FaultyTier):
    @hookimpl
    def get_finished_jobs(self):
        return [result for result in super().get_finished_jobs() for _ in range(2)]


@killed_by(EACH_JOB, "no result of the store 1 within 2 s", patience_s=HANGS)
class NothingForEmptyJobs(FaultyTier):
    @hookimpl
    def submit_store(self, job):
        if job.keys:
            super().submit_store(job)


@killed_by(EACH_JOB, "no result of the load 4 within 2 s", patience_s=HANGS)
class LosesResults(FaultyTier):
    @hookimpl
    def get_finished_jobs(self):
        return [result for result in super().get_finished_jobs() if not result.missing]


@killed_by(EACH_JOB, "not a JobResult")
class AnswersWithDicts(FaultyTier):
    @hookimpl
    def get_finished_jobs(self):
        return [{"job_id": result.job_id} for result in super().get_finished_jobs()]


@killed_by(LOOKUP, "2 answers for 3 keys")
class ShortLookup(FaultyTier):
    @hookimpl
    def lookup(self, job):
        return [key in self.blocks[self.namespace] for key in dict.fromkeys(job.keys)]


@killed_by(LOOKUP, "the lookup of one key twice")
class UnorderedLookup(FaultyTier):
    @hookimpl
    def lookup(self, job):
        return sorted(key in self.blocks[self.namespace] for key in job.keys)


@killed_by("test_c30_absent_keys_are_missing_and_not_failed", "the keys that the load reported missing")
class MissingAsFailed(FaultyTier):
    @hookimpl
    def get_finished_jobs(self):
        return [
            JobResult(job_id=result.job_id, present=result.present, failed=result.missing)
            for result in super().get_finished_jobs()
        ]


@killed_by("test_c30_cancelled_jobs_have_their_result", "no result of the store", patience_s=HANGS)
class CancelForgets(FaultyTier):
    @hookimpl
    def cancel_jobs(self, job_ids):
        self._results = [result for result in self._results if result.job_id not in job_ids]


@killed_by("test_c20_storing_twice_changes_nothing", "keys of the job failed: it is there")
class FailsWhatIsThere(FaultyTier):
    def _carry_out(self, kind, job, namespace):
        there = [key for key in job.keys if key in self.blocks[namespace]] if kind == "store" else []
        if there:
            return JobResult(job_id=job.id, failed=there, error="it is there")
        return super()._carry_out(kind, job, namespace)


@killed_by("test_c30_one_key_twice_in_a_job", "the buffers of one key twice")
class OneBufferAKey(FaultyTier):
    def _carry_out(self, kind, job, namespace):
        if kind == "load":
            by_key = dict(zip(job.keys, job.buffers, strict=True))
            job = replace(job, keys=tuple(by_key), buffers=tuple(by_key.values()))
        return super()._carry_out(kind, job, namespace)


@killed_by("test_c30_jobs_in_flight_together", "the buffers of many jobs")
class MixesJobs(FaultyTier):
    """Begins the jobs when their results are fetched, with the buffers of the last."""

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.waiting: list[Any] = []

    @hookimpl
    def submit_load(self, job):
        self.waiting.append(job)

    @hookimpl
    def get_finished_jobs(self):
        jobs, self.waiting = self.waiting, []
        for job in jobs:
            super().submit_load(replace(job, buffers=(*jobs[-1].buffers, *job.buffers)[: len(job.keys)]))
        return super().get_finished_jobs()


# Hanging.


@killed_by(LOOKUP, "lookup did not return within 2 s", patience_s=HANGS)
class HangsInLookup(FaultyTier):
    @hookimpl
    def lookup(self, job):
        threading.Event().wait()


@killed_by(EACH_JOB, "get_finished_jobs did not return within 2 s", patience_s=HANGS)
class WaitsForJobs(FaultyTier):
    @hookimpl
    def get_finished_jobs(self):
        results = super().get_finished_jobs()
        while not results:
            time.sleep(0.01)
        return results


@killed_by(WHOLE, "on_open did not return within 2 s", patience_s=HANGS)
class HangsInOnOpen(FaultyTier):
    @hookimpl
    def on_open(self, pool):
        threading.Event().wait()


@killed_by(
    "test_c34_shutdown_twice_answers_every_job", "shutdown did not return within 4 s", patience_s=HANGS
)
class HangsInShutdown(FaultyTier):
    @hookimpl
    def shutdown(self, timeout_s):
        threading.Event().wait()


# Rows.


@killed_by(WHOLE, "the loaded rows")
class NeighboursRow(PoolTier):
    def moved(self, job):
        return [row + 1 for row in job.rows]


@killed_by(ONLY_ITS_ROWS, "which lies beside the rows of jobs")
class NeighboursRowAsWell(PoolTier):
    def _carry_out(self, kind, job, namespace):
        for row in job.rows if kind == "load" else ():
            self.row(row + 1)[:] = bytes(self.pool.row_stride)
        return super()._carry_out(kind, job, namespace)


@killed_by(ONLY_ITS_ROWS, "which lies beside the rows of jobs")
class ScribblesWhenStoring(PoolTier):
    def _carry_out(self, kind, job, namespace):
        for row in job.rows if kind == "store" else ():
            self.row(row - 1)[-1:] = b"!"
        return super()._carry_out(kind, job, namespace)


@killed_by(LEFT_ALONE, "after the result of the load")
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


@killed_by(LEFT_ALONE, "after the result of the load")
class WritesCancelledLate(PoolTier):
    """The client goes on with a request that was cancelled."""

    @hookimpl
    def cancel_jobs(self, job_ids):
        self.cancelled = True

    @hookimpl
    def submit_load(self, job):
        super().submit_load(job)
        threading.Timer(0.05, self.go_on, [job]).start()

    def go_on(self, job) -> None:
        for row in job.rows:
            self.row(row)[:1] = b"!"


# Wrong bytes.


@killed_by(DISCARDED, "the lookup of absent and stored keys")
class DiscardsNothing(FaultyTier):
    @hookimpl
    def discard(self, keys):
        pass


@killed_by(DISCARDED, "the lookup of absent and stored keys")
class DiscardsAll(FaultyTier):
    @hookimpl
    def discard(self, keys):
        self.blocks[self.namespace].clear()


@killed_by("test_c03_a_store_replaces_a_block_that_gave_wrong_bytes", "the loaded rows: 1 of 4 are wrong")
class KeepsWrongBytes(FaultyTier):
    """Three flipped blocks cost their tokens for ever."""

    @hookimpl
    def discard(self, keys):
        pass

    def _carry_out(self, kind, job, namespace):
        if kind == "store":
            for key, buffer in zip(job.keys, job.buffers, strict=True):
                self.blocks[namespace].setdefault(key, bytes(buffer))
            return JobResult(job_id=job.id)
        return super()._carry_out(kind, job, namespace)


# Room and age.


@killed_by(REPORTS, "the keys reported, against those that lookups find")
class ReportsNoEviction(BoundedHooks):
    def drop(self, blocks, keys):
        for key in keys:
            del blocks[key]


@killed_by(REPORTS, "keys of before the reset are reported after it")
class ReportsOldNamespace(BoundedHooks):
    @hookimpl
    def reset(self, namespace, description):
        self.context.report_stored(list(self.blocks[self.namespace]))
        super().reset(namespace, description)


@killed_by("test_c16_events_replay_into_the_contents", "the keys that the events leave")
class ReportsTooMuch(BoundedHooks):
    def _carry_out(self, kind, job, namespace):
        if kind == "store":
            self.context.report_stored([key[::-1] for key in job.keys])
            self.context.report_evicted(job.keys)
        return super()._carry_out(kind, job, namespace)


@killed_by(CAPACITY, "30 blocks are there, in a capacity of 10")
class IgnoresCapacity(BoundedHooks):
    most = 1 << 30


@killed_by(CAPACITY, "of the blocks stored last none is there")
class DropsTheNewest(BoundedHooks):
    def _carry_out(self, kind, job, namespace):
        full = len(self.blocks[namespace]) >= self.most
        return (
            JobResult(job_id=job.id) if kind == "store" and full else super()._carry_out(kind, job, namespace)
        )

    @hookimpl
    def submit_store(self, job):
        full = len(self.blocks[self.namespace]) >= self.most
        super().submit_store(job)
        if full:
            self.context.report_evicted(job.keys)


@killed_by("test_c55_blocks_older_than_ttl_end", "a block is still served", patience_s=HANGS)
class IgnoresTtl(BoundedHooks):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.ttl = float("inf")


@killed_by("test_c55_blocks_younger_than_ttl_stay", "with a ttl of 60 s blocks are gone at once")
class TtlInMilliseconds(BoundedHooks):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.ttl /= 1000


# Lives.


@killed_by(RESET, "the lookup of absent and stored keys")
class ResetKeeps(FaultyTier):
    @hookimpl
    def reset(self, namespace, description):
        pass


@killed_by(RESET, "the keys that the load reported missing")
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


@killed_by("test_c34_a_reset_leaves_other_namespaces_alone", "the lookup of absent and stored keys")
class ResetFlushes(HookStore):
    """FLUSHALL."""

    @hookimpl
    def reset(self, namespace, description):
        for blocks in self.blocks.values():
            blocks.clear()
        super().reset(namespace, description)


@killed_by(
    "test_c32_a_persistent_tier_has_its_blocks_after_a_restart", "the lookup of absent and stored keys"
)
class ForgetsAtShutdown(HookStore):
    @hookimpl
    def shutdown(self, timeout_s):
        self.blocks[self.namespace].clear()


@killed_by("test_c02_namespaces_are_apart", "the lookup of absent and stored keys")
class NamespaceBlind(HookStore):
    def __init__(self, settings, context):
        super().__init__(settings, replace(context, namespace="all"))


@killed_by("test_c02_instances_without_storage_share_nothing", "the lookup of absent and stored keys")
class SharedInClass(FaultyTier):
    everybody: ClassVar[dict[Any, bytes]] = {}

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.blocks[context.namespace] = self.everybody


@killed_by(
    "test_c52_what_one_instance_stores_another_finds",
    "it still does not find what the other",
    patience_s=HANGS,
)
class SharedInNameAlone(HookStore):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.blocks = {context.namespace: {}}


@killed_by("test_c32_a_reader_beside_the_writer_sees_whole_blocks", "was read half-written")
class HalfVisible(HookStore):
    @hookimpl
    def submit_store(self, job):
        threading.Thread(target=self.write, args=[job, self.blocks[self.namespace]]).start()

    def write(self, job, blocks) -> None:
        for key, buffer in zip(job.keys, job.buffers, strict=True):
            half = len(buffer) // 2
            blocks[key] = bytes(buffer[:half]) + bytes(len(buffer) - half)
            time.sleep(0.02)
            blocks[key] = bytes(buffer)
        self._results.append(JobResult(job_id=job.id))
        self.context.wake()


@killed_by("test_c52_the_constructor_does_no_io", "the constructor did I/O: subprocess.Popen")
class StartsInConstructor(FaultyTier):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        import subprocess

        subprocess.run(["true"], check=True)


@killed_by("test_c34_a_tier_that_was_never_opened_can_be_closed", "AttributeError")
class ShutdownNeedsOpen(FaultyTier):
    @hookimpl
    def on_open(self, pool):
        self.thread = threading.Thread(target=int)
        self.thread.start()

    @hookimpl
    def shutdown(self, timeout_s):
        self.thread.join(timeout_s)


@killed_by("test_c34_what_was_opened_is_closed", "left 3 of each: thread poller", patience_s=HANGS)
class LeavesThreads(FaultyTier):
    @hookimpl
    def on_open(self, pool):
        threading.Thread(target=threading.Event().wait, name="poller", daemon=True).start()


@killed_by("test_c33_a_tier_that_cannot_open_says_so", "the tier raised OSError: nobody listens")
class RaisesItsOwn(HookStore):
    @hookimpl
    def on_open(self, pool):
        if self.settings.root.parent.is_file():  # type: ignore[attr-defined]
            raise OSError("nobody listens")


@killed_by(
    "test_c31_drain_names_no_job_that_has_ended", "drain_jobs names jobs although they had time to end"
)
class DrainNamesAll(FaultyTier):
    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.jobs: list[int] = []

    @hookimpl
    def submit_store(self, job):
        self.jobs.append(job.id)
        super().submit_store(job)

    @hookimpl
    def drain_jobs(self, timeout_s):
        return self.jobs
