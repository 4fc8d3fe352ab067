"""What one request's filter decides for others, which must be nothing (C27, B5)."""

from tests.coordinator.test_request_level import stores
from tests.sim.scripted import JobHook, TierScript
from tests.sim.world import World, generous_limits, make_keys


def world_of(*tiers: TierScript | str, **limits: float) -> World:
    """A request "one" that may store to the first tier alone, and "both" that may store to all."""
    world = World(8, tiers, limits=generous_limits(8, **limits))
    world.new_request("one", store_tiers=["x"])
    world.new_request("both")
    return world


def offer(world: World, request: str, keys: str) -> None:
    """Offer what the pool holds already; what leaves is answered."""
    assert world.prepare_store(request, make_keys(keys)).keys == ()
    world.answer_all(JobHook.STORE)


def test_b5_a_block_on_its_way_goes_to_the_tiers_of_everybody_who_offered_it():
    world = world_of("x", "y")
    prepared = world.prepare_store("one", make_keys("ab"))
    assert world.prepare_store("both", make_keys("ab")).keys == ()
    world.complete_store(prepared.job_id)
    assert stores(world, "x", "one") == make_keys("ab")
    assert stores(world, "y", "both") == make_keys("ab")
    assert stores(world, "x", "both") == stores(world, "y", "one") == []


def test_b5_a_request_is_over_only_when_its_block_has_come_and_gone_on():
    world = world_of("x", "y")
    prepared = world.prepare_store("one", make_keys("a"))
    world.prepare_store("both", make_keys("a"))
    world.finish("both")
    world.complete_store(prepared.job_id)
    hooks = [call.hook for call in world.hooks.calls if (call.tier, call.request) == ("y", "both")]
    assert hooks == ["on_new_request", "submit_store", "on_request_finished"]


def test_b5_a_store_that_fails_keeps_nobody_waiting():
    world = world_of("x", "y")
    prepared = world.prepare_store("one", make_keys("a"))
    world.prepare_store("both", make_keys("a"))
    world.finish("both", "one")
    world.complete_store(prepared.job_id, success=False)
    world.settle()
    world.check_at_rest()


def test_b5_a_block_in_the_pool_goes_to_the_tier_that_a_filter_kept_it_from_once():
    world = world_of("x", "y")
    world.put("one", make_keys("ab"))
    offer(world, "both", "ab")
    assert stores(world, "y", "both") == make_keys("ab")
    assert stores(world, "x", "both") == []
    world.advance(60.0)
    world.new_request("third")
    offer(world, "third", "ab")
    assert stores(world, "y", "third") == []


def test_b5_a_filter_that_forbids_the_tier_too_gives_it_nothing():
    world = world_of("x", "y")
    world.put("one", make_keys("a"))
    world.new_request("also one", store_tiers=["x"])
    offer(world, "also one", "a")
    assert stores(world, "y", "also one") == []
    offer(world, "both", "a")
    assert stores(world, "y", "both") == make_keys("a")


def test_b5_what_a_tier_that_is_behind_does_not_get_is_counted():
    world = world_of("x", TierScript.limited("y", max_cascade=0.125))
    world.put("one", make_keys("abc"))
    world.prepare_store("both", make_keys("abc"))
    assert stores(world, "y", "both") == make_keys("a")
    assert world.coordinator.counters.tiers["y"].dropped == 2


def test_b5_a_tier_with_a_threshold_counts_the_offers_of_all_and_is_given_by_the_filter_of_the_last():
    world = world_of("x", TierScript(name="y", store_threshold=2))
    prepared = world.prepare_store("one", make_keys("a"))
    world.prepare_store("both", make_keys("a"))
    world.complete_store(prepared.job_id)
    assert stores(world, "y", "both") == make_keys("a")
    world.put("one", make_keys("b"))
    world.prepare_store("both", make_keys("b"))
    assert stores(world, "y", "both") == make_keys("ab")


def test_b5_whether_a_tier_holds_a_block_is_not_decided_by_a_filter_on_loads():
    world = World(8, [TierScript(name="x", resident=True)])
    world.new_request("first")
    world.put("first", make_keys("a"))
    world.reset(tiers=False)
    world.new_request("second", load_tiers=[])
    assert world.lookup("second", make_keys("a")).hits == 0
    world.put("second", make_keys("a"))
    assert stores(world, "x", "second") == []


def test_b5_a_block_promoted_for_one_request_is_not_given_to_other_tiers():
    world = world_of("x", "y")
    world.put("one", make_keys("a"))
    world.reset(tiers=False)
    world.fetch("one", make_keys("a"))
    offer(world, "both", "a")
    assert world.jobs(JobHook.STORE) == []
    assert stores(world, "y", "both") == []
