"""What a tier's results say is held against their jobs, and what does not fit is told, not only counted (C30)."""

import pytest

from kvtier_core.values import JobResult
from tests.manager.conftest import key

OTHER = key(9)
DOES_NOT_FIT = "it names 1 keys that its job does not have"


def answer_with(bench, kind, **result):
    """Let the tier answer jobs of this kind with these results alone; returns what it counts."""
    tier = bench.tiers["one"]
    carry_out = tier._carry_out
    tier._carry_out = lambda k, job, namespace: (
        JobResult(job_id=job.id, **result) if k == kind else carry_out(k, job, namespace)
    )
    return bench.manager.counters.tiers["one"]


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ({"present": [True]}, "present must have an answer for each of 2 keys, not 1"),
        ({"present": [True] * 3}, "present must have an answer for each of 2 keys, not 3"),
        ({}, "present must have an answer for each of 2 keys, not 0"),
        ({"present": [True, True], "failed": [OTHER]}, DOES_NOT_FIT),
    ],
)
def test_c30_an_answer_to_a_lookup_that_does_not_fit_is_told(make_bench, caplog, result, told):
    bench = make_bench()
    counted = answer_with(bench, "lookup", **result)
    bench.new("a")
    assert bench.lookup("a", 1, 2) == 0
    assert counted.faults == 1
    assert f"a result of lookup raised ValueError: {told}" in caplog.text


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("name", ["missing", "failed", "held"])
def test_c30_a_result_that_names_keys_of_other_jobs_is_told(make_bench, caplog, kind, name):
    bench = make_bench(max_quarantined=1.0)
    bench.new("a")
    if kind == "load":
        bench.store("a", 1, 2)
        bench.settle()
        bench.evict_all()
    counted = answer_with(bench, kind, **{name: [OTHER]})
    if kind == "store":
        bench.store("a", 1, 2)
        bench.settle()
    else:
        assert bench.load("a", 1, 2) == []
    assert counted.faults == 1
    assert f"a result of submit_{kind} raised ValueError: {DOES_NOT_FIT}" in caplog.text
    assert "wrong bytes" not in caplog.text, "no block was said to be there"


def test_c30_a_failure_that_the_tier_does_not_explain_is_told_all_the_same(make_bench, caplog):
    bench = make_bench()
    counted = answer_with(bench, "store", failed=[key(1)])
    bench.new("a")
    bench.store("a", 1, 2)
    bench.settle()
    assert counted.store_failed == 1
    assert "a submit_store job failed: 1 of 2 blocks, without a reason (JobResult.error)" in caplog.text


def test_c30_a_result_that_comes_twice_is_told_with_its_job(make_bench, caplog):
    bench = make_bench()
    tier = bench.tiers["one"]
    bench.new("a")
    tier.hold.add("store")
    bench.store("a", 1)
    bench.until(lambda: bool(tier.held))
    number = tier.held[0][1].id
    tier.extra_results.append(JobResult(job_id=number, missing=[key(1)] * 1000))
    tier.release()
    bench.until(lambda: bench.manager.counters.tiers["one"].faults == 1)
    assert (
        f"get_finished_jobs handed out a result of job {number}, which fits no job that this tier has under way"
        in caplog.text
    )
    assert len(caplog.text) < 1000
