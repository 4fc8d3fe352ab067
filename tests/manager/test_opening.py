"""A tier that can't open when the engine starts: refused by default, or left out until it opens (``open_retry``)."""

import asyncio
import re
import threading

import pytest
from pydantic import ValidationError

from kvtier_core.errors import TierOpenError
from kvtier_core.tier_settings import TierLimits
from tests.manager.conftest import key

DOWN = TierOpenError("the server refused the connection")


def called(tier, *hooks):
    return [(hook, request) for hook, request in tier.calls if hook in hooks]


def down(name="one"):
    """Makes the tier *name* fail to open until its ``raise_in`` is cleared."""

    def prepare(tier):
        if tier.context.name == name:
            tier.raise_in["on_open"] = DOWN

    return prepare


def open_at_last(bench, name="one"):
    bench.tiers[name].raise_in.clear()
    bench.until(lambda: bench.manager.figures()["tiers"][name]["serving"])


def test_c30_without_a_retry_the_start_fails_and_says_why(make_bench):
    with pytest.raises(TierOpenError, match="'one'.*test-dist 9.9.*could not open: the server refused"):
        make_bench(prepare=down())


def test_c30_a_tier_that_can_not_open_costs_hits_until_it_has_opened(make_bench, caplog):
    bench = make_bench(["bad", "good"], prepare=down("bad"), open_retry=0.05)
    bench.new("a")
    bench.store("a", 1, 2)
    bench.settle()
    bench.evict_all()
    assert bench.load("a", 1, 2) == [True, True]
    assert bench.manager.counters.hits["good"] == 2
    bench.until(lambda: len(called(bench.tiers["bad"], "on_open")) >= 3)
    assert {hook for hook, _ in bench.tiers["bad"].calls} == {"on_open"}, "a hook before the tier was open"
    assert "it could not open: the server refused the connection" in caplog.text

    open_at_last(bench, "bad")
    assert "'bad' (type 'faulty'" in caplog.text
    assert re.search(r"is open now: it serves from here on; .* happened again: open \d+ times", caplog.text)
    assert caplog.text.count("it could not open") == 1, "B20"
    bench.manager.request_finished("a")
    bench.new("b")
    bench.store("b", 3)
    bench.settle()
    held = bench.tiers["bad"].blocks[bench.manager.namespace.name]
    assert sorted(held) == [key(1), key(2), key(3)], "what it missed, and the pool holds, is made up for"


def test_c26_it_hears_of_the_requests_that_are_still_running_before_any_job(make_bench):
    bench = make_bench(prepare=down(), open_retry=0.05)
    for request in ("over", "running"):
        bench.new(request)
    bench.manager.request_finished("over")
    port = bench.manager._tiers.ports["one"]
    bench.until(lambda: list(port._unheard) == ["running"])  # the end passes two threads
    open_at_last(bench)
    bench.store("running", 1)
    bench.settle()
    bench.manager.request_finished("running")
    tier = bench.tiers["one"]
    bench.until(lambda: bool(called(tier, "on_request_finished")))
    assert called(tier, "on_new_request", "submit_store", "on_request_finished") == [
        ("on_new_request", "running"),
        ("submit_store", "running"),
        ("on_request_finished", "running"),
    ]


def test_c31_a_tier_that_hangs_while_opening_is_not_waited_for_longer_than_the_timeout(make_bench, caplog):
    event = threading.Event()

    def prepare(tier):
        tier.hang_in["on_open"] = event

    bench = make_bench(prepare=prepare, open_retry=5.0, timeout_s=0.2)
    assert "did not open within 0.2 s" in caplog.text
    bench.new("a")
    bench.store("a", 1)
    assert bench.load("a", 1) == [True]  # from the pool
    event.set()
    bench.until(lambda: bench.manager.figures()["tiers"]["one"]["serving"])


def test_c31_without_a_retry_one_that_hangs_fails_the_start(make_bench):
    event = threading.Event()

    def prepare(tier):
        tier.hang_in["on_open"] = event

    with pytest.raises(TierOpenError, match="did not open within 0.2 s"):
        make_bench(prepare=prepare, timeout_s=0.2)


def test_c34_a_reset_before_it_is_open_holds_once_it_is(make_bench):
    bench = make_bench(prepare=down(), open_retry=0.05)
    bench.manager.reset_cache()
    open_at_last(bench)
    tier = bench.tiers["one"]
    assert tier.namespace == bench.manager.namespace.name
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    assert len(tier.blocks[tier.namespace]) == 1


@pytest.mark.parametrize("retry", [{"open_retry": 0.05}, {}])
def test_c34_a_reset_that_fails_is_tried_again(make_bench, monkeypatch, retry):
    monkeypatch.setattr("kvtier_core.manager.port._RESET_RETRY_S", 0.05)
    bench = make_bench(**retry)
    tier = bench.tiers["one"]
    tier.raise_in["reset"] = OSError("gone")
    bench.manager.reset_cache()
    bench.until(lambda: bench.manager.counters.tiers["one"].faults >= 1)
    assert tier.wait_for_call("reset", times=3)
    tier.raise_in.clear()
    bench.until(lambda: bench.manager.figures()["tiers"]["one"]["serving"])
    assert bench.manager.counters.tiers["one"].faults == 1, "a try that tells nothing new"


def test_c31_while_the_engine_does_nothing_no_try_adds_to_what_it_has_to_take_in(make_bench):
    bench = make_bench(prepare=down(), open_retry=0.01)
    assert bench.tiers["one"].wait_for_call("on_open", times=5)
    assert bench.manager._events.empty()


@pytest.mark.parametrize("pause", [0, "1ms"])
def test_c54_a_pause_between_tries_that_is_none_is_refused(pause):
    with pytest.raises(ValidationError, match=r"open_retry\n.*greater than or equal to 0\.01"):
        TierLimits(open_retry=pause)


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), OSError("no")])
def test_c30_whatever_a_tiers_constructor_raises_names_the_tier(make_bench, error):
    def prepare(tier):
        raise error

    with pytest.raises(TierOpenError, match="'one'.*test-dist 9.9.*could not open"):
        make_bench(prepare=prepare)


def test_a_constructor_that_raises_is_tried_again_as_an_open_is(make_bench):
    built = []

    def prepare(tier):
        built.append(tier)
        if len(built) == 1:
            raise OSError("no")

    bench = make_bench(prepare=prepare, open_retry=0.05)
    bench.until(lambda: bench.manager.figures()["tiers"]["one"]["serving"])
    assert len(built) == 2


def test_a_tier_that_can_not_have_a_thread_is_named_and_is_down(make_bench, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "kvtier-one":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(TierOpenError, match="'one'.*could not open: can't start new thread"):
        make_bench()


def test_a_tier_that_never_opened_does_not_hold_up_the_shutdown(make_bench):
    bench = make_bench(prepare=down(), open_retry=60.0)
    assert bench.manager.shutdown(10.0)
