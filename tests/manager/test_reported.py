"""A tier on the hook specs reports what it holds, and forgets what gave wrong bytes, as a blocking tier can (C55)."""

import pytest

from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.manager.presence import ReportedContents
from kvtier_core.values import JobResult, MissReason, RequestInfo, TierInfo, TierJob
from kvtier_testing.rows import similar_keys
from tests.manager.conftest import key

REPORTS = TierInfo(medium="memory", reports_contents=True)
A, B, C = similar_keys(3)


def hooks_called(bench):
    return [hook for hook, _ in bench.tiers["one"].calls]


def test_c03_a_tier_is_told_which_blocks_gave_wrong_bytes(make_bench):
    bench = make_bench(max_quarantined=1.0)
    bench.new("a")
    bench.store("a", 1, 2)
    bench.settle()
    bench.evict_all()
    tier = bench.tiers["one"]
    tier.corrupt = True
    assert bench.load("a", 1, 2) == []
    bench.until(lambda: tier.discarded == [key(1), key(2)])


def test_b20_wrong_bytes_are_told_once_and_counted_at_the_end(make_bench, caplog):
    bench = make_bench(max_quarantined=1.0, breaker_failures=100)
    bench.new("a")
    bench.store("a", 1, 2)
    bench.settle()
    bench.evict_all()
    bench.tiers["one"].corrupt = True
    for number in (1, 2):
        assert bench.load("a", number) == []
    assert bench.manager.counters.tiers["one"].integrity == 2
    bench.manager.shutdown(10)
    assert caplog.text.count("wrong bytes came for 1 blocks") == 1
    assert "happened again: wrong bytes 1 times" in caplog.text


def test_c30_a_tier_that_raises_when_it_is_to_discard_harms_nobody(make_bench, caplog):
    bench = make_bench()
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    bench.evict_all()
    tier = bench.tiers["one"]
    tier.corrupt = True
    tier.raise_in["discard"] = OSError("no")
    assert bench.load("a", 1) == []
    bench.until(lambda: bench.manager.counters.tiers["one"].faults == 1)
    assert "discard raised OSError: no" in caplog.text


@pytest.mark.parametrize("shared", [False, True])
def test_c10_a_tier_that_reports_its_contents_gets_no_lookup(make_bench, shared):
    info = TierInfo(medium="memory", reports_contents=True, shared=shared)
    bench = make_bench(info=info)
    bench.new("a")
    assert bench.manager.lookup("a", [[key(1)]]).is_settled
    bench.store("a", 1, 2)
    bench.settle()
    bench.evict_all()
    assert bench.load("a", 1, 2) == [True, True]
    bench.evict_all()
    bench.tiers["one"].context.report_evicted([key(2)])
    loads = hooks_called(bench).count("submit_load")
    bench.new("b")
    assert bench.load("b", 2) == []
    assert hooks_called(bench).count("submit_load") == loads
    assert "lookup" not in hooks_called(bench)


def test_c10_what_others_put_there_is_found_once_it_is_reported(make_bench):
    bench = make_bench(info=REPORTS, num_rows=8)
    tier = bench.tiers["one"]
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    tier.context.report_evicted([key(1)])
    bench.evict_all()
    bench.new("b")
    assert bench.load("b", 1) == []
    tier.context.report_stored([key(1)])
    assert bench.load("b", 1) == [True]


def test_c34_after_a_reset_the_report_begins_anew(make_bench):
    bench = make_bench(info=REPORTS)
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    bench.manager.reset_cache()
    bench.until(lambda: bench.manager.figures()["tiers"]["one"]["serving"])
    assert bench.load("a", 1) == []
    bench.new("b")
    bench.store("b", 1)
    bench.settle()
    bench.evict_all()
    assert bench.load("b", 1) == [True]
    assert "lookup" not in hooks_called(bench)


def test_c34_wrong_bytes_of_before_a_reset_cost_no_block_of_after_it(make_bench, caplog):
    bench = make_bench(info=REPORTS, max_quarantined=1.0)
    tier = bench.tiers["one"]
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    bench.evict_all()
    tier.hold.add("load")
    bench.manager.lookup("a", [[key(1)]])
    bench.until(lambda: bool(tier.held))
    bench.manager.reset_cache()
    bench.until(lambda: bench.manager.figures()["tiers"]["one"]["serving"])
    bench.new("b")
    bench.store("b", 1)
    bench.settle()
    tier.release(also_write=b"!")
    bench.until(lambda: not bench.manager.coordinator.state.quarantined_rows)
    tier.hold.clear()
    bench.evict_all()
    assert bench.load("b", 1) == [True]
    assert tier.discarded == []
    assert "wrong bytes" not in caplog.text


def test_c34_what_was_reported_in_a_reset_that_failed_does_not_count(make_bench):
    bench = make_bench(info=REPORTS, open_retry=0.05)
    tier = bench.tiers["one"]
    tier.raise_in["reset"] = OSError("not now")
    bench.manager.reset_cache()
    assert tier.wait_for_call("reset")
    tier.context.report_stored([key(1)])
    tier.raise_in.clear()
    bench.until(lambda: bench.manager.figures()["tiers"]["one"]["serving"])
    bench.new("a")
    assert bench.load("a", 1) == []
    assert "submit_load" not in hooks_called(bench)


def test_c23_what_was_reported_and_is_not_there_is_a_miss_and_not_reported_any_more(make_bench):
    bench = make_bench(info=REPORTS, miss_ttl=0.0)
    bench.tiers["one"].context.report_stored([key(1)])
    for name in ("a", "b"):
        bench.new(name)
        assert bench.load(name, 1) == []
    assert hooks_called(bench).count("submit_load") == 1
    assert bench.manager.counters.misses == {MissReason.NOT_STORED: 2}


def test_c10_a_tier_that_holds_more_than_is_remembered_is_asked(make_bench):
    bench = make_bench(info=REPORTS, max_resident_keys=2)
    bench.new("a")
    bench.store("a", 1, 2, 3)
    bench.settle()
    bench.manager.coordinator.state.tiers["one"].presence._told.clear()
    bench.evict_all()
    assert bench.load("a", 1, 2, 3) == [True] * 3
    assert "lookup" in hooks_called(bench)


def test_c10_a_tier_that_does_not_say_so_reports_nothing(make_bench):
    bench = make_bench()
    bench.tiers["one"].context.report_stored([key(1)])
    bench.new("a")
    assert bench.load("a", 1) == []
    assert "lookup" in hooks_called(bench)


def job(number, *keys):
    return TierJob(id=number, request=RequestInfo(request_id="r"), keys=keys)


def test_c52_a_block_that_leaves_before_its_store_has_ended_is_not_taken_to_be_there():
    reported = ReportedContents(10)
    store = job(1, A, B, C)
    reported.begin(JobKind.TIER_STORE, store)
    reported.evicted([A])
    reported.end(JobKind.TIER_STORE, store, JobResult(job_id=1, missing=[C]))
    assert reported.keys.contains_many([A, B, C]) == [False, True, False]


def test_c10_what_is_reported_while_a_load_finds_it_gone_is_there():
    reported = ReportedContents(10)
    reported.stored([A, B])
    load = job(1, A, B)
    reported.begin(JobKind.TIER_LOAD, load)
    reported.stored([A])  # in another place, after the load had looked
    reported.end(JobKind.TIER_LOAD, load, JobResult(job_id=1, missing=[A, B]))
    assert reported.keys.contains_many([A, B]) == [True, False]


@pytest.mark.parametrize("failed", [(), (A, B)])
def test_c52_a_store_that_failed_put_nothing_there(failed):
    reported = ReportedContents(10)
    store = job(1, A, B)
    reported.begin(JobKind.TIER_STORE, store)
    reported.end(JobKind.TIER_STORE, store, JobResult(job_id=1, failed=failed, error="no"))
    assert reported.keys.contains_many([A, B]) == [False, False]


def test_c34_a_store_of_before_a_reset_puts_nothing_there():
    reported = ReportedContents(10)
    store = job(1, A)
    reported.begin(JobKind.TIER_STORE, store)
    reported.clear()
    reported.end(JobKind.TIER_STORE, store, JobResult(job_id=1))
    assert reported.keys.contains_many([A]) == [False]


@pytest.mark.parametrize("keys", [7, [7], "abc", [type("Odd", (bytes,), {})(b"x")]])
def test_c30_what_are_no_keys_is_refused_where_it_is_reported(keys):
    reported = ReportedContents(10)
    for report in (reported.stored, reported.evicted):
        with pytest.raises(TypeError, match="keys must"):
            report(keys)
