"""A tier's fault costs hits and nothing else (C30, C31): not the engine's thread, not another tier, not a row."""

import re
import threading
import time
import traceback

import pytest

from kvtier_core.errors import TierOpenError
from kvtier_core.keys import make_offload_key
from kvtier_core.manager.events import TierFault
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
    assert not ledger.leases
    assert all(not block.pins for block in ledger.blocks)


@pytest.mark.parametrize("hook", ["submit_store", "on_new_request", "lookup", "submit_load"])
def test_c31_the_engine_never_waits_for_a_hook_that_hangs_and_another_tier_still_hits(make_bench, hook):
    bench = make_bench(
        ["hung", "good"], load_timeout=1, store_timeout=1, lookup_timeout=1, presence_ttl_s=0.1
    )
    bench.new("a")
    bench.store("a", 1, 2)
    bench.settle()
    bench.evict_all()
    time.sleep(2)  # until what the tiers are known to hold has lapsed, so that they are asked
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
    bench = make_bench(["hung", "good"], store_timeout=1, lookup_timeout=1)
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
    before, calls = time.process_time(), len(bench.tiers["one"].calls)
    bench.manager.wait(2.0)
    assert time.process_time() - before < 0.2
    assert len(bench.tiers["one"].calls) - calls <= 3, "the late answer is looked for once a second"
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


def test_c31_however_much_nonsense_one_call_gives_it_is_one_fault(make_bench):
    bench = make_bench()
    tier = bench.tiers["one"]
    tier.extra_results += [None] * 1000
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    bench.until(lambda: bench.manager.counters.tiers["one"].faults > 0)
    assert bench.manager.counters.tiers["one"].faults == 1
    assert bench.manager.counters.tiers["one"].stored == 1


def test_c24_c31_a_step_takes_in_what_was_reported_before_it_and_no_more(make_bench, monkeypatch):
    manager = make_bench().manager
    taken = []

    def on_fault(tier, _now, *, of_job):
        taken.append(tier)
        if len(taken) < 100:
            manager._events.put(TierFault(tier))  # a tier that reports as fast as it is listened to

    monkeypatch.setattr(manager.coordinator, "on_fault", on_fault)
    manager._events.put(TierFault("one"))
    manager.end_step()
    assert taken == ["one"]


def test_c30_a_repeated_load_result_cannot_make_unchecked_bytes_visible(make_bench):
    bench = make_bench()
    tier = bench.tiers["one"]
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    bench.evict_all()
    tier.hold.add("load")
    tier.corrupt = True
    bench.manager.lookup("a", [[make_offload_key((1).to_bytes(32, "big"), 0)]])
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


def test_c31_a_tier_that_keeps_failing_is_taken_out_of_the_path_and_tried_again(make_bench, caplog):
    bench = make_bench(breaker_failures=2, breaker_pause_s=0.2)
    tier = bench.tiers["one"]
    tier.raise_in["submit_store"] = OSError("no")
    bench.new("a")
    for number in range(4):
        bench.store("a", number)
        bench.settle()
    assert bench.manager.figures()["tiers"]["one"]["stores"] == "open"
    assert bench.manager.counters.tiers["one"].dropped == 2
    assert caplog.text.count("is out of the path for stores after failures in a row") == 1
    assert "in the path again" not in caplog.text
    tier.raise_in.clear()

    numbers = iter(range(100, 10_000))

    def closes() -> bool:
        bench.store("a", next(numbers))
        return bench.manager.figures()["tiers"]["one"]["stores"] == "closed"

    bench.until(closes)
    bench.settle()
    assert caplog.text.count("tier 'one' (type 'faulty' of test-dist 9.9) is in the path again after ") == 1
    assert re.search(r"is in the path again after \d+ s", caplog.text)


def test_c31_work_that_is_late_is_told_with_the_limits_it_passed(make_bench, caplog):
    bench = make_bench(lookup_timeout=0.05, breaker_failures=100)
    bench.tiers["one"].hold.add("lookup")
    bench.new("a")
    for number in range(3):
        assert bench.lookup("a", number) == 0
    assert bench.manager.counters.tiers["one"].timeouts == 3
    assert caplog.text.count("did not answer in time") == 1
    assert "limits.lookup_timeout" in caplog.text


def test_b20_late_answers_are_told_once_and_their_number_at_the_end(make_bench, caplog):
    bench = make_bench(lookup_timeout=0.05, breaker_failures=100)
    tier = bench.tiers["one"]
    tier.hold.add("lookup")
    bench.new("a")
    for number in range(3):
        assert bench.lookup("a", number) == 0
    assert "happened again" not in caplog.text
    assert caplog.text.count("did not answer in time") == 1
    bench.manager.shutdown(10)
    bench.manager.shutdown(10)
    assert (
        caplog.text.count("was shut down; what was told of it before happened again: late answer 2 times")
        == 1
    )


def test_b20_a_failure_is_told_once_and_counted_when_the_tier_is_in_the_path_again(make_bench, caplog):
    bench = make_bench(breaker_failures=3, breaker_pause_s=0.2)
    tier = bench.tiers["one"]
    tier.raise_in["submit_store"] = OSError("no")
    bench.new("a")
    for number in range(3):
        bench.store("a", number)
        bench.settle()
    assert caplog.text.count("OSError: no") == 1
    tier.raise_in.clear()
    numbers = iter(range(100, 10_000))

    def closes() -> bool:
        bench.store("a", next(numbers))
        return bench.manager.figures()["tiers"]["one"]["stores"] == "closed"

    bench.until(closes)
    bench.settle()
    assert re.search(
        r"is in the path again after \d+ s; .* happened again: submit_store \d+ times", caplog.text
    )
    tier.raise_in["submit_store"] = OSError("no")
    bench.store("a", 99)
    bench.settle()
    assert caplog.text.count("OSError: no") == 2, "a new fault is told"


def test_c31_a_tier_that_loses_answers_is_told_of_and_gets_no_more_until_it_answers(make_bench, caplog):
    bench = make_bench(store_timeout=0.05, breaker_failures=100, max_unanswered=2)
    tier = bench.tiers["one"]
    tier.hold.add("store")
    bench.new("a")
    for number in range(5):
        bench.store("a", number)
        bench.settle()
    assert len(tier.held) == 2
    assert bench.manager.counters.tiers["one"].dropped == 3
    assert bench.manager.figures()["tiers"]["one"]["unanswered_stores"] == 2
    assert caplog.text.count("has left 2 overdue stores without any answer") == 1
    tier.hold.clear()
    tier.release()
    bench.until(lambda: bench.manager.figures()["tiers"]["one"]["unanswered_stores"] == 0)
    bench.store("a", 10)
    bench.settle()
    counters = bench.manager.counters.tiers["one"]
    assert (counters.stored, counters.made_up) == (4, 3), "what it missed meanwhile, too"
    assert caplog.text.count("has answered overdue jobs, and gets new ones again") == 1


def test_c30_b20_one_fault_of_many_blocks_is_logged_once(make_bench, caplog):
    bench = make_bench(breaker_failures=100)
    bench.tiers["one"].hold.add("store")
    bench.new("a")
    for number in range(8):
        bench.store("a", number)
        bench.until(lambda: bool(bench.tiers["one"].held))
        job = bench.tiers["one"].held.pop()[1]
        error = f"{number} of 8 blocks failed: OSError: /kv/{number:064x}.kv: no space left"
        bench.tiers["one"].extra_results.append(JobResult(job_id=job.id, error=error))
        bench.tiers["one"].context.wake()
        bench.settle()
    assert caplog.text.count("no space left") == 1


@pytest.mark.parametrize("answer", [7, "yes", [True, True], [], [1], iter([True])])
def test_c30_b16_a_lookup_answer_of_wrong_length_or_type_is_a_fault_and_a_miss(
    make_bench, monkeypatch, answer
):
    bench = make_bench()
    bench.new("a")
    bench.tiers["one"].hold.add("lookup")
    assert bench.manager.lookup("a", [[make_offload_key((1).to_bytes(32, "big"), 0)]]).ready_tokens == 0
    bench.until(lambda: bool(bench.tiers["one"].held))
    job = bench.tiers["one"].held.pop()[1]
    bench.tiers["one"].extra_results.append(JobResult(job_id=job.id, present=answer))
    bench.tiers["one"].context.wake()
    assert bench.lookup("a", 1) == 0
    assert bench.manager.counters.misses == {MissReason.TIER_FAILED: 1}
    assert bench.manager.counters.tiers["one"].faults == 1


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


SECRET = "hunter" + "22"  # in two, so that a traceback's source lines do not hold it


class Lazy(list):
    """A tier's own sequence, which misbehaves when somebody looks at it."""

    def __iter__(self):
        raise OSError("looked at")

    def __len__(self):
        raise OSError("looked at")


class HashTrap(bytes):
    def __hash__(self):
        raise OSError("hashed")

    def __eq__(self, other):
        raise OSError("compared")


class UnspeakableError(Exception):
    def __str__(self):
        raise OSError("no words")

    __repr__ = __str__


@pytest.mark.parametrize(
    "odd",
    [
        {"missing": Lazy()},
        {"failed": Lazy()},
        {"present": Lazy()},
        {"missing": [HashTrap(b"x" * 36)]},
        {"error": type("Text", (str,), {"__str__": Lazy.__len__})("x")},
    ],
)
@pytest.mark.parametrize("kind", ["lookup", "store", "load"])
def test_c30_nothing_of_a_tiers_own_making_is_looked_at_outside_its_hook_thread(make_bench, kind, odd):
    bench = make_bench(["odd", "good"])
    odd_tier = bench.tiers["odd"]
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    bench.evict_all()
    if kind == "lookup":
        bench.manager.coordinator.state.tiers["odd"].presence.clear()  # so that it is asked
    odd_tier.hold.add(kind)
    if kind == "store":
        bench.store("a", 2)
    else:
        bench.manager.lookup("a", [[make_offload_key((1).to_bytes(32, "big"), 0)]])
    bench.until(lambda: bool(odd_tier.held))
    job = odd_tier.held.pop()[1]
    odd_tier.extra_results.append(JobResult(job_id=job.id, **odd))
    odd_tier.context.wake()
    # The good tier's loads still come through, checked by the same threads.
    assert bench.load("a", 1) == [True]
    bench.settle()


def test_c30_an_exception_without_words_harms_nobody(make_bench):
    bench = make_bench()
    bench.tiers["one"].raise_in["submit_store"] = UnspeakableError()
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    assert bench.manager.counters.tiers["one"].store_failed == 1
    assert bench.manager.shutdown(10)


def test_c31_a_tier_far_behind_hears_of_no_new_request_and_its_inbox_does_not_grow(make_bench, monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.hook_tier.MAX_WAITING", 20)
    bench = make_bench(["hung", "good"], lookup_timeout=0.2, store_timeout=0.2)
    event = threading.Event()
    bench.tiers["hung"].hang_in["on_new_request"] = event
    for number in range(200):
        bench.new(f"r{number}")
        bench.store(f"r{number}", number)
        bench.manager.request_finished(f"r{number}")
    bench.settle()
    inbox = bench.manager._tiers.ports["hung"]._inbox
    assert inbox._calls.qsize() < 150
    event.set()
    bench.until(lambda: inbox._calls.qsize() == 0)
    calls = [call for call in bench.tiers["hung"].calls if call[1]]
    told = [request for hook, request in calls if hook == "on_new_request"]
    assert told == list(dict.fromkeys(told))
    assert sorted(told) == sorted(request for hook, request in calls if hook == "on_request_finished")
    assert {request for _, request in calls} == set(told)


def test_wake_in_a_loop_waits_once(make_bench):
    bench = make_bench()
    event = threading.Event()
    bench.tiers["one"].hang_in["on_new_request"] = event
    bench.new("a")
    for _ in range(10_000):
        bench.tiers["one"].context.wake()
    assert bench.manager._tiers.ports["one"]._inbox._calls.qsize() < 10
    event.set()


def test_c53_a_secret_shows_neither_in_the_error_of_an_open_nor_in_what_a_tier_logs(make_bench, caplog):
    def prepare(tier):
        tier.raise_in["on_open"] = OSError(f"login with {SECRET} refused")
        try:
            raise tier.raise_in["on_open"]
        except OSError:
            tier.context.log.exception("%s", SECRET)

    with pytest.raises(TierOpenError) as caught:
        make_bench(prepare=prepare, secrets=frozenset({SECRET}))
    text = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert "login with *" in text
    assert SECRET not in text
