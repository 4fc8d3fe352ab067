"""A request's id may be used again once it is over, though its last rows are still being sealed (C26, C30)."""

import threading
from functools import partial

import pytest

from kvtier_core.manager.inbox import Inbox
from kvtier_core.values import OffloadPolicy, RequestInfo
from tests.manager.conftest import PATIENCE_S, key


@pytest.fixture
def hold_sealing(make_bench):
    """Makes a bench in whose sealing thread nothing moves on until the event is set."""
    event = threading.Event()

    def make(**limits):
        bench = make_bench(**limits)
        bench.new("w")
        bench.store("w", 1, 2)
        bench.settle()
        bench.evict_all()
        bench.settle()
        bench.tiers["one"].calls.clear()
        bench.manager._tiers._integrity.after_sealing(lambda: event.wait(PATIENCE_S))
        return bench, event

    yield make
    event.set()


def hooks_of(bench, request):
    return [hook for hook, name in bench.tiers["one"].calls if name == request]


def test_c26_c30_a_second_life_of_an_id_is_told_after_the_end_of_the_first(hold_sealing):
    bench, event = hold_sealing(max_quarantined=1.0)
    bench.manager.coordinator.state.tiers["one"].presence.clear()  # so that the tier is asked
    bench.new("r")
    bench.store("r", 3)
    bench.manager.request_finished("r")
    bench.new("r")
    assert bench.manager.lookup("r", [[key(1), key(2)]]).ready_tokens == 0
    event.set()
    assert bench.load("r", 1, 2) == [True, True]
    bench.store("r", 4)
    bench.manager.request_finished("r")
    bench.settle()
    bench.until(lambda: hooks_of(bench, "r").count("on_request_finished") == 2)
    assert hooks_of(bench, "r") == [
        "on_new_request",
        "submit_store",
        "on_request_finished",
        "on_new_request",
        "lookup",
        "submit_load",
        "submit_store",
        "on_request_finished",
    ]
    counters = bench.manager.counters.tiers["one"]
    assert (counters.stored, counters.loaded, counters.faults) == (4, 2, 0)
    assert (counters.store_failed, counters.load_failed) == (0, 0)


def test_c26_many_lives_of_an_id_follow_one_another(hold_sealing):
    bench, event = hold_sealing()
    for number in range(4):
        bench.new("r")
        bench.store("r", 10 + number)
        bench.manager.request_finished("r")
    event.set()
    bench.until(lambda: hooks_of(bench, "r").count("on_request_finished") == 4)
    assert hooks_of(bench, "r") == ["on_new_request", "submit_store", "on_request_finished"] * 4
    bench.settle()
    assert bench.manager.counters.tiers["one"].store_failed == 0


def test_c26_one_request_object_may_begin_twice(hold_sealing):
    bench, event = hold_sealing()
    info = RequestInfo(request_id="r")
    for number in (10, 11):
        bench.manager.new_request(info)
        bench.store("r", number)
        bench.manager.request_finished("r")
    event.set()
    bench.until(lambda: hooks_of(bench, "r").count("on_request_finished") == 2)
    assert hooks_of(bench, "r") == ["on_new_request", "submit_store", "on_request_finished"] * 2


def test_c25_c26_what_the_first_life_was_not_given_is_told_of_the_first_alone(hold_sealing):
    bench, event = hold_sealing(store_timeout=0.2)
    tier = bench.tiers["one"]
    tier.policy = OffloadPolicy.REQUEST_LEVEL
    bench.new("r")
    bench.until(lambda: bench.manager.is_request_level("r"))
    bench.store("r", 10)
    bench.until(lambda: bench.manager.counters.tiers["one"].timeouts == 1)
    bench.manager.request_finished("r")
    bench.new("r")
    told = []
    event.set()
    bench.until(lambda: hooks_of(bench, "r").count("on_request_finished") == 1)
    told.append(tier.not_stored["r"])
    bench.manager.request_finished("r")
    bench.until(lambda: hooks_of(bench, "r").count("on_request_finished") == 2)
    told.append(tier.not_stored["r"])
    assert told == [(key(10),), ()]


def test_c31_calls_that_are_held_back_count_for_how_far_a_tier_is_behind():
    inbox = Inbox(max_waiting=10)
    lives = [RequestInfo(request_id="r") for _ in range(100)]
    ran: list[int] = []
    for number, life in enumerate(lives):
        inbox.begin_request(life, partial(ran.append, number))
    for life in lives:
        inbox.end_request(life, lambda: None)
    while (call := inbox.get(0.0)) is not None:
        call()
    assert ran == list(range(10))
    assert not inbox._lives
    assert not inbox.put_job(lives[0], lambda: None)
    inbox.begin_request(lives[0], lambda: None)
    assert inbox.put_job(lives[0], lambda: None), "nothing is left of what was held back"
