"""Resets (C34, C36, K7): nothing of an earlier epoch surfaces, and rows under transfer stay out of use."""

import pytest

from kvtier_core.coordinator.breaker import BreakerState
from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.values import LookupState, MissReason
from tests.sim.scripted import Answer, JobHook, TierScript
from tests.sim.world import World, make_keys

HIT, PENDING, RETRY, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.RETRY, LookupState.MISS


def filled(num_rows: int, *tiers: TierScript | str) -> World:
    """Requests "w" and "r"; "a" lies in the pool and in every tier."""
    world = World(num_rows, tiers or ["a"])
    world.new_request("w", "r")
    world.put("w", make_keys("a"))
    return world


def test_c34_k7_o4_after_a_reset_every_tier_misses():
    world = filled(4, "x", TierScript(name="y", resident=True))
    world.reset()
    assert world.ledger.num_free == 4
    assert world.fetch("r", make_keys("a")).hits == 0


def test_c31_c34_stores_that_resets_end_do_not_take_a_healthy_tier_out_of_the_path():
    world = World(4, [TierScript.limited("a", breaker_failures=2)])
    world.new_request("w")
    for key in "abcd":
        world.put("w", make_keys(key), cascade=False)
        (job,) = world.jobs(JobHook.STORE)
        world.reset()
        world.answer(job, Answer.FAILED)
    breaker = world.coordinator.state.tiers["a"].service(JobKind.TIER_STORE).breaker
    assert breaker.state is BreakerState.CLOSED


def test_c34_until_a_tier_serves_the_new_epoch_it_is_neither_asked_nor_given_anything():
    world = filled(4)
    world.reset(ready=False)
    assert world.lookup("r", make_keys("a")).reason is MissReason.TIER_FAILED
    world.put("w", make_keys("b"), cascade=False)
    assert world.jobs(JobHook.LOOKUP) == world.jobs(JobHook.STORE) == []
    world.tier_ready("a")
    assert list(world.lookup("r", make_keys("a")).states) == [RETRY]


def test_c34_a_reset_of_the_pool_alone_keeps_the_tiers():
    world = filled(4)
    world.reset(tiers=False)
    assert world.fetch("r", make_keys("a")).hits == 1


def test_c34_a_tier_that_ignores_the_reset_gives_no_stale_bytes():
    world = filled(4, TierScript(name="a", obeys_reset=False))
    world.reset()
    found = world.fetch("r", make_keys("a"))
    assert (found.hits, found.reason) == (0, MissReason.INTEGRITY)


def test_k7_o4_a_store_of_an_earlier_epoch_does_not_surface_later():
    world = World(4, ["a"])
    world.new_request("w", "r")
    world.put("w", make_keys("a"), cascade=False)
    store = world.jobs(JobHook.STORE)[0]
    world.reset()
    world.answer(store)
    assert list(world.lookup("r", make_keys("a")).states) == [RETRY], "it is not taken as present"
    assert world.fetch("r", make_keys("a")).hits == 0


def test_k7_o4_a_lookup_of_an_earlier_epoch_says_nothing_about_the_new_one():
    world = filled(4)
    world.reset(tiers=False)
    world.advance(60.0)
    world.lookup("r", make_keys("a"))
    old = world.jobs(JobHook.LOOKUP)[0]
    world.reset()
    world.answer(old, Answer.LIE)
    assert list(world.lookup("r", make_keys("a")).states) == [RETRY]


def test_k7_o4_a_lookup_that_was_late_before_the_reset_says_nothing_either():
    world = filled(4)
    world.reset(tiers=False)
    world.advance(60.0)
    world.lookup("r", make_keys("a"))
    old = world.jobs(JobHook.LOOKUP)[0]
    world.advance(5.0)
    world.reset()
    world.answer(old, Answer.LIE)
    assert list(world.lookup("r", make_keys("a")).states) == [RETRY]


@pytest.mark.parametrize("tiers", [False, True])
def test_c36_the_rows_of_a_device_store_under_way_are_not_handed_out(tiers):
    world = World(1, ["a"])
    world.new_request("w", "r")
    prepared = world.prepare_store("w", make_keys("a"))
    world.reset(tiers=tiers)
    world.begin("r")
    assert world.prepare_store("r", make_keys("b")) is None
    world.complete_store(prepared.job_id)
    assert world.jobs(JobHook.STORE) == []
    assert world.fetch("r", make_keys("a")).hits == 0
    assert world.prepare_store("r", make_keys("b")) is not None


def test_c36_a_promotion_after_a_reset_does_not_get_the_row_of_a_device_store_under_way():
    world = filled(1)
    prepared = world.prepare_store("w", make_keys("b"))
    world.reset(tiers=False)
    found = world.fetch("r", make_keys("a"))
    assert (found.hits, found.reason) == (0, MissReason.PRIMARY_FULL)
    world.complete_store(prepared.job_id)
    assert world.fetch("r", make_keys("a")).hits == 1


@pytest.mark.parametrize("tiers", [False, True])
def test_c36_the_rows_of_a_device_load_under_way_are_not_handed_out(tiers):
    world = filled(1)
    prepared = world.prepare_load("r", make_keys("a"))
    world.reset(tiers=tiers)
    world.begin("w")
    assert world.prepare_store("w", make_keys("b")) is None
    world.complete_load(prepared.job_id)
    assert world.prepare_store("w", make_keys("b")) is not None


@pytest.mark.parametrize("tiers", [False, True])
def test_c31_a_reset_quarantines_the_rows_of_a_tier_load_under_way(tiers):
    world = filled(1, TierScript(name="a", resident=True))
    world.reset(tiers=False)
    world.lookup("r", make_keys("a"))
    world.end_step()
    load = world.jobs(JobHook.LOAD)[0]
    world.reset(tiers=tiers)
    assert world.coordinator.state.tiers["a"].quarantined_rows == 1
    world.begin("w")
    assert world.prepare_store("w", make_keys("b")) is None
    assert not world.coordinator.has_pending_work
    world.answer(load)
    assert world.prepare_store("w", make_keys("b")) is not None
    assert list(world.lookup("r", make_keys("a")).states) == [MISS]


@pytest.mark.parametrize("tiers", [False, True])
def test_c34_a_reset_takes_reservations_back_that_have_not_left(tiers):
    world = filled(1, TierScript(name="a", resident=True))
    world.reset(tiers=False)
    assert list(world.lookup("r", make_keys("a")).states) == [PENDING]
    world.reset(tiers=tiers)
    world.end_step()
    assert world.jobs(JobHook.LOAD) == []
    assert world.ledger.num_free == 1


def test_c34_rows_pinned_for_a_tier_store_stay_pinned_over_a_reset():
    world = World(1, ["a"])
    world.new_request("w", "r")
    world.put("w", make_keys("a"), cascade=False)
    world.reset()
    world.begin("r")
    assert world.prepare_store("r", make_keys("b")) is None
    world.answer_all(JobHook.STORE)
    assert world.prepare_store("r", make_keys("b")) is not None


def test_c34_two_resets_are_as_good_as_one():
    world = filled(4, "x", TierScript(name="y", resident=True))
    world.prepare_store("w", make_keys("b"))
    world.prepare_load("r", make_keys("a"))
    world.reset(tiers=False)
    world.lookup("r", make_keys("a"))
    world.end_step()
    world.put("w", make_keys("c"), cascade=False)
    world.reset()
    world.reset()
    world.reset(tiers=False)
    assert world.fetch("r", make_keys("a")).hits == 0
    world.settle()
    world.check_at_rest()


def test_c13_a_promise_is_withdrawn_by_a_reset_at_prepare_load():
    world = filled(4)
    assert world.lookup("r", make_keys("a")).hits == 1
    world.reset()
    assert world.prepare_load("r", make_keys("a")).keys == ()


def test_c13_a_lease_of_an_earlier_epoch_does_not_free_a_block_of_the_new_one():
    world = filled(1)
    world.lookup("r", make_keys("a"))
    world.reset()
    world.put("w", make_keys("a"))
    world.new_request("s")
    world.lookup("s", make_keys("a"))
    world.finish("r")
    assert world.prepare_store("w", make_keys("b")) is None


def test_c34_a_finished_request_with_a_store_under_way_ends_after_a_reset_too():
    world = World(2, ["a"])
    world.new_request("r")
    prepared = world.prepare_store("r", make_keys("a"))
    world.finish("r")
    world.reset()
    world.complete_store(prepared.job_id)
    assert [call.hook for call in world.hooks.calls if call.request == "r"] == [
        "on_new_request",
        "on_request_finished",
    ]


@pytest.mark.parametrize("tiers", [False, True])
def test_v1_c04_what_was_computed_before_a_reset_is_not_stored_before_the_request_begins_anew(tiers):
    world = World(4, ["a"])
    world.new_request("r")
    world.reset(tiers=tiers)
    assert world.coordinator.prepare_store("r", make_keys("a"), world.now).keys == ()
    assert not world.coordinator.may_store("r")
    world.begin("r")
    assert world.prepare_store("r", make_keys("a")).keys == make_keys("a")


def test_v1_c04_what_a_preempted_request_offers_is_not_stored_before_it_begins_anew():
    world = World(4, ["a"])
    world.new_request("r", "s")
    world.preempt("r")
    assert world.coordinator.prepare_store("r", make_keys("a"), world.now).keys == ()
    assert world.prepare_store("s", make_keys("b")).keys == make_keys("b"), "others go on"
    world.begin("r")
    assert world.prepare_store("r", make_keys("a")).keys == make_keys("a")


def test_v1_c04_c25_a_whole_request_that_a_reset_met_gives_its_tier_nothing_either():
    world = World(4, ["a"])
    world.new_request("r", "w")
    world.ask_for_whole("a", "r")
    world.reset(tiers=False)
    world.put("w", make_keys("a"))
    world.prepare_store("r", make_keys("a"))
    assert world.jobs(JobHook.STORE) == []
    world.begin("r")
    world.prepare_store("r", make_keys("a"))
    assert len(world.jobs(JobHook.STORE)) == 1
