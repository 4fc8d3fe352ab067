"""A tier's fault costs hits and nothing else (C30, C31): not the engine's thread, not another tier, not a row."""

import threading
import time

import pytest

from kvtier_core.keys import make_offload_key
from kvtier_core.values import JobResult, MissReason

HOOKS = [
    "lookup",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "on_new_request",
    "on_request_finished",
]


@pytest.mark.parametrize("error", [OSError("disk gone"), ValueError(), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("hook", HOOKS)
def test_c30_any_exception_from_any_hook_costs_hits_only(make_bench, hook, error):
    bench = make_bench(["bad", "good"], load_timeout=0.5, store_timeout=0.5, lookup_timeout=0.5)
    bench.tiers["bad"].raise_in[hook] = error
    bench.new("a")
    bench.store("a", 1, 2)
    bench.settle()
    bench.evict_all()
    assert bench.load("a", 1, 2) == [True, True]
    bench.manager.request_finished("a")
    bench.settle()
    # A failed job is counted as such, anything else that raises as a fault.
    bad = bench.manager.counters.tiers["bad"]
    bench.until(lambda: bad.faults > 0 or hook in {"lookup", "submit_load", "submit_store"})
    ledger = bench.manager.coordinator.state.ledger
    assert all(not block.pins and not block.leases for block in ledger.blocks)


@pytest.mark.parametrize("hook", ["submit_store", "on_new_request", "lookup", "submit_load"])
def test_c31_the_engine_never_waits_for_a_hook_that_hangs_and_another_tier_still_hits(make_bench, hook):
    bench = make_bench(
        ["hung", "good"], load_timeout=0.3, store_timeout=0.3, lookup_timeout=0.2, presence_ttl=0.1
    )
    bench.new("a")
    bench.store("a", 1, 2)
    bench.settle()
    bench.evict_all()
    time.sleep(0.6)  # until what the tiers are known to hold has lapsed, so that they are asked
    event = threading.Event()
    bench.tiers["hung"].hang_in[hook] = event
    started = time.monotonic()
    bench.new("b")
    bench.store("b", 3)
    assert time.monotonic() - started < 5  # the hook hangs for as long as the test lasts
    assert bench.load("b", 1, 2) == [True, True]
    assert bench.manager.counters.hits["good"] >= 1 or hook in {"submit_store", "on_new_request"}
    bench.settle()
    event.set()


def test_a_tier_that_hangs_on_stores_while_another_still_hits(make_bench):
    bench = make_bench(["hung", "good"], store_timeout=0.3, lookup_timeout=0.3)
    event = threading.Event()
    bench.tiers["hung"].hang_in["submit_store"] = event
    bench.new("a")
    bench.store("a", 1, 2)
    bench.settle()
    bench.evict_all()
    assert bench.load("a", 1, 2) == [True, True]
    assert bench.manager.counters.hits == {"good": 2}
    assert bench.manager.counters.tiers["hung"].timeouts >= 1
    event.set()


def test_c31_an_overdue_load_keeps_its_rows_until_the_tier_answers(make_bench):
    bench = make_bench(num_rows=16, load_timeout=0.2)
    tier = bench.tiers["one"]
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    bench.evict_all()
    tier.hold.add("load")
    assert bench.lookup("a", 1) == 0
    ledger = bench.manager.coordinator.state.ledger
    assert ledger.num_detached == 1
    assert not bench.manager.has_pending_work
    # The key can be stored elsewhere meanwhile, and the late result, writing garbage, harms nobody.
    bench.store("a", 1)
    tier.hold.clear()
    tier.release(also_write=b"garbage")
    bench.until(lambda: ledger.num_detached == 0)
    assert bench.load("a", 1) == [True]


def test_an_idle_process_with_a_quarantined_job_uses_no_cpu(make_bench):
    bench = make_bench(load_timeout=0.1)
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    bench.evict_all()
    bench.tiers["one"].hold.add("load")
    assert bench.lookup("a", 1) == 0
    assert bench.manager.coordinator.state.ledger.num_detached == 1
    before = time.process_time()
    bench.manager.wait(2.0)
    assert time.process_time() - before < 0.2
    bench.tiers["one"].release()


@pytest.mark.parametrize(
    "nonsense",
    [
        JobResult(job_id=10**9),
        "not a result",
        None,
        JobResult(job_id="1"),  # type: ignore[arg-type]
        JobResult(job_id=[1]),  # type: ignore[arg-type]
    ],
)
def test_c30_a_result_that_fits_no_job_is_a_fault_and_harms_nobody(make_bench, nonsense):
    bench = make_bench()
    tier = bench.tiers["one"]
    tier.extra_results.append(nonsense)
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    bench.until(lambda: bench.manager.counters.tiers["one"].faults == 1)
    bench.evict_all()
    assert bench.load("a", 1) == [True]


def test_c30_a_repeated_load_result_cannot_make_unchecked_bytes_visible(make_bench):
    bench = make_bench()
    tier = bench.tiers["one"]
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    bench.evict_all()
    tier.hold.add("load")
    tier.corrupt = True
    bench.manager.lookup("a", [make_offload_key((1).to_bytes(32, "big"), 0)])
    bench.until(lambda: bool(tier.held))
    tier.extra_results.append(JobResult(job_id=tier.held[0][1].id))
    tier.release()
    bench.until(lambda: bench.manager.counters.tiers["one"].faults >= 1)
    assert bench.load("a", 1) == []


@pytest.mark.parametrize("missing", [None, 7, [None]])
def test_c30_a_malformed_result_is_a_failed_job(make_bench, missing):
    bench = make_bench()
    tier = bench.tiers["one"]
    bench.new("a")
    tier.hold.add("store")
    bench.store("a", 1)
    bench.until(lambda: bool(tier.held))
    tier.extra_results.append(JobResult(job_id=tier.held.pop()[1].id, missing=missing))
    tier.context.wake()
    bench.settle()
    assert bench.manager.counters.tiers["one"].store_failed == 1


def test_k5_o1_clean_up_that_raises_after_a_transfer_leaves_nothing_pinned(make_bench):
    bench = make_bench(store_timeout=0.3)
    tier = bench.tiers["one"]
    bench.new("a")
    tier.raise_in["get_finished_jobs"] = RuntimeError("clean-up failed")
    bench.store("a", 1)
    bench.until(lambda: bench.manager.counters.tiers["one"].faults >= 1)
    tier.raise_in.clear()
    bench.settle()
    assert all(not block.pins for block in bench.manager.coordinator.state.ledger.blocks)


def test_k8_o2_one_tier_failing_in_shutdown_does_not_stop_the_others(make_bench):
    bench = make_bench(["one", "two", "three"])
    bench.tiers["two"].raise_in["shutdown"] = OSError("stuck")
    assert not bench.manager.shutdown(5)  # the mapping must be kept: "two" has not confirmed
    assert all(tier.wait_for_call("shutdown") for tier in bench.tiers.values())
    assert not bench.manager.shutdown(0)


def test_c34_shutdown_is_bounded_when_a_hook_hangs(make_bench):
    bench = make_bench(["hung", "good"])
    event = threading.Event()
    bench.tiers["hung"].hang_in["on_new_request"] = event
    bench.new("a")
    started = time.monotonic()
    assert not bench.manager.shutdown(1.0)
    assert time.monotonic() - started < 10
    event.set()


def test_c31_a_tier_that_keeps_failing_is_taken_out_of_the_path_and_tried_again(make_bench):
    bench = make_bench(breaker_failures=2, breaker_pause=0.2)
    tier = bench.tiers["one"]
    tier.raise_in["submit_store"] = OSError("no")
    bench.new("a")
    for number in range(4):
        bench.store("a", number)
        bench.settle()
    assert bench.manager.describe_tiers()["one"]["stores"] == "open"
    assert bench.manager.counters.tiers["one"].dropped == 2
    tier.raise_in.clear()

    numbers = iter(range(100, 10_000))

    def closes() -> bool:
        bench.store("a", next(numbers))
        return bench.manager.describe_tiers()["one"]["stores"] == "closed"

    bench.until(closes)


@pytest.mark.parametrize("answer", [7, "yes", [True, True], [], [1], [None], iter([True])])
def test_c30_a_lookup_answer_of_wrong_length_or_type_is_a_fault_and_a_miss(make_bench, monkeypatch, answer):
    bench = make_bench()
    bench.new("a")
    bench.tiers["one"].hold.add("lookup")
    assert bench.manager.lookup("a", [make_offload_key((1).to_bytes(32, "big"), 0)]).hits == 0
    bench.until(lambda: bool(bench.tiers["one"].held))
    job = bench.tiers["one"].held.pop()[1]
    bench.tiers["one"].extra_results.append(JobResult(job_id=job.id, present=answer))
    bench.tiers["one"].context.wake()
    assert bench.lookup("a", 1) == 0
    assert bench.manager.counters.misses == {MissReason.TIER_FAILED: 1}


def test_c30_a_failed_job_is_logged_with_tier_package_and_cause_and_without_secrets(make_bench, caplog):
    bench = make_bench(secrets=frozenset({"hunter22"}))
    bench.tiers["one"].raise_in["submit_store"] = OSError("login as hunter22 refused")
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    assert (
        "tier 'one' (type 'faulty' of test-dist 9.9): submit_store raised OSError: login as ***"
        in caplog.text
    )
    assert "hunter22" not in caplog.text
