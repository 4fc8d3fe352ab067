"""Whole requests with real tiers and threads (C25, C26): what ``on_new_request`` answers is heeded when it comes."""

import threading

import pytest

from kvtier_core.values import OffloadPolicy, RequestInfo
from tests.manager.conftest import key


def wants_all(tier):
    tier.policy = OffloadPolicy.REQUEST_LEVEL


def told_of(bench, name, request):
    """Wait until a tier was told that a request is over; what it was told it did not get."""
    bench.until(lambda: request in bench.tiers[name].not_stored)
    return bench.tiers[name].not_stored[request]


def begin_whole(bench, request):
    bench.new(request)
    bench.until(lambda: bench.manager.is_request_level(request))


def test_c25_a_tier_that_asks_gets_what_the_pool_held_already(make_bench):
    bench = make_bench(["one", "two"])
    bench.manager.new_request(RequestInfo(request_id="w"), store_tiers=())
    bench.store("w", 1, 2)
    wants_all(bench.tiers["one"])
    begin_whole(bench, "r")
    bench.store("r", 1, 2, 3)
    bench.manager.request_finished("r")
    assert told_of(bench, "one", "r") == ()
    bench.settle()
    namespace = bench.manager.namespace.name
    assert sorted(bench.tiers["one"].blocks[namespace]) == [key(1), key(2), key(3)]
    # The filter of "w" is not that of "r".
    assert sorted(bench.tiers["two"].blocks[namespace]) == [key(1), key(2), key(3)]
    bench.evict_all()
    bench.new("s")
    assert bench.load("s", 1, 2, 3) == [True, True, True], "sealed although no tier took them at first"


def test_c25_remote_decode_gives_every_tier_all_of_the_request(make_bench):
    bench = make_bench(["one", "two"])
    bench.manager.new_request(RequestInfo(request_id="w"), store_tiers=())
    bench.store("w", 1)
    bench.manager.new_request(RequestInfo(request_id="r", params={"do_remote_decode": True}))
    bench.store("r", 1, 2)
    bench.settle()
    for tier in bench.tiers.values():
        assert sorted(tier.blocks[tier.namespace]) == [key(1), key(2)]


@pytest.mark.parametrize("nonsense", ["request_level", True, 7, object()])
def test_c30_c25_an_answer_that_is_no_policy_is_a_fault_and_harms_nobody(make_bench, nonsense):
    bench = make_bench()
    bench.tiers["one"].policy = nonsense
    bench.new("r")
    bench.until(lambda: bench.manager.counters.tiers["one"].faults == 1)
    assert not bench.manager.is_request_level("r")
    bench.store("r", 1)
    bench.settle()
    assert bench.manager.counters.tiers["one"].stored == 1


def test_c26_c25_a_store_that_came_too_late_is_told_as_not_stored(make_bench):
    bench = make_bench(store_timeout=0.2)
    tier = bench.tiers["one"]
    wants_all(tier)
    begin_whole(bench, "r")
    event = threading.Event()
    tier.hang_in["on_schedule_end"] = event
    tier.hang_in["on_new_request"] = event
    bench.new("other")  # its news keeps the hook thread busy
    bench.store("r", 1)
    bench.until(lambda: bench.manager.counters.tiers["one"].timeouts == 1)
    event.set()
    bench.manager.request_finished("r")
    assert told_of(bench, "one", "r") == (key(1),)
