"""Whole requests (C25): which tiers get them, what follows, what waits, and what a tier is told it did not get."""

import pytest

from tests.sim.scripted import Answer, JobHook, TierScript
from tests.sim.world import World, generous_limits, make_keys


def stores(world: World, tier: str, request: str) -> list[bytes]:
    """The keys that a tier was given as part of a request, in order."""
    return [
        key
        for call in world.hooks.calls
        if (call.hook, call.tier, call.request) == ("submit_store", tier, request)
        for key in call.keys
    ]


def not_stored(world: World, request: str) -> list[tuple[str, tuple[bytes, ...]]]:
    """What each tier was told at a request's end that it did not get."""
    return [
        (call.tier, call.keys)
        for call in world.hooks.calls
        if (call.hook, call.request) == ("on_request_finished", request)
    ]


def world_with(keys: str, num_rows: int, *tiers: TierScript | str, **limits: float) -> World:
    """A pool that holds *keys*, which no tier does any more; requests "w" and "r" have begun, "r" nowhere whole."""
    world = World(num_rows, tiers or ["a"], limits=generous_limits(num_rows, **limits))
    world.new_request("w", "r")
    for key in make_keys(keys):
        world.put("w", [key])
    for tier in world.tiers.values():
        tier.contents.clear()
    world.advance(60.0)
    return world


# -- who gets what


def test_c25_a_tier_of_block_level_gets_only_what_was_computed():
    world = world_with("ab", 8)
    world.put("r", make_keys("abc"))
    assert stores(world, "a", "r") == make_keys("c")


def test_c25_a_tier_that_asks_gets_the_blocks_that_the_pool_holds_and_the_other_tiers_do_not():
    world = world_with("ab", 8, "x", "y")
    world.ask_for_whole("x", "r")
    prepared = world.prepare_store("r", make_keys("abc"))
    assert prepared.keys == make_keys("c")
    assert stores(world, "x", "r") == make_keys("ab")
    world.complete_store(prepared.job_id)
    assert stores(world, "x", "r") == make_keys("abc")
    assert stores(world, "y", "r") == make_keys("c")


def test_c25_nothing_new_is_still_an_offer_of_what_is_held():
    world = world_with("ab", 8)
    world.ask_for_whole("a", "r")
    assert world.prepare_store("r", make_keys("ab")).keys == ()
    assert stores(world, "a", "r") == make_keys("ab")


def test_c25_an_offer_without_room_still_gives_what_is_held():
    world = world_with("ab", 2)
    world.ask_for_whole("a", "r")
    assert world.prepare_store("r", make_keys("abc")) is None
    assert stores(world, "a", "r") == make_keys("ab")


def test_c25_a_late_answer_is_heeded_from_then_on():
    world = world_with("ab", 8)
    world.prepare_store("r", make_keys("a"))
    world.ask_for_whole("a", "r")
    world.prepare_store("r", make_keys("b"))
    assert stores(world, "a", "r") == make_keys("b")


def test_c25_an_answer_after_the_end_of_the_request_is_ignored():
    world = world_with("ab", 8)
    world.finish("r")
    world.ask_for_whole("a", "r")
    world.new_request("r")  # another one of that name
    world.prepare_store("r", make_keys("ab"))
    assert stores(world, "a", "r") == []


def test_c25_an_answer_to_an_earlier_request_of_the_same_name_is_ignored():
    world = world_with("ab", 8)
    earlier = world.coordinator.state.requests["r"].info
    world.finish("r")
    world.new_request("r")
    world.coordinator.on_request_level("a", earlier)
    assert not world.coordinator.is_request_level("r")
    world.prepare_store("r", make_keys("ab"))
    assert stores(world, "a", "r") == []


def test_c25_do_remote_decode_makes_every_allowed_tier_request_level():
    world = World(8, ["x", "y", "z"])
    world.new_request("w", store_tiers=[])
    world.put("w", make_keys("ab"))
    world.new_request("r", remote_decode=True, store_tiers=["x", "z"])
    world.put("r", make_keys("abc"))
    assert {tier: sorted(stores(world, tier, "r")) for tier in "xyz"} == {
        "x": make_keys("abc"),
        "y": [],
        "z": make_keys("abc"),
    }


def test_c27_c25_a_tier_that_the_filter_leaves_out_gets_nothing_by_asking():
    world = world_with("ab", 8, "x", "y")
    world.new_request("s", store_tiers=["y"])
    world.ask_for_whole("x", "s")
    world.prepare_store("s", make_keys("ab"))
    assert stores(world, "x", "s") == []


def test_c20_c25_each_key_is_given_once_however_often_it_is_offered():
    world = world_with("ab", 8)
    world.put("r", make_keys("c"))  # before the tier asked
    world.ask_for_whole("a", "r")
    for _ in range(3):
        world.prepare_store("r", make_keys("abc"))
        world.answer_all(JobHook.STORE)
    assert sorted(stores(world, "a", "r")) == make_keys("abc")


def test_c25_a_tier_gets_what_it_holds_already_because_it_asked_for_all():
    world = World(8, [TierScript(name="a", resident=True)])
    world.new_request("w", "r")
    world.put("w", make_keys("ab"))
    world.ask_for_whole("a", "r")
    world.prepare_store("r", make_keys("ab"))
    assert stores(world, "a", "r") == make_keys("ab")


# -- what is on its way


@pytest.mark.parametrize("success", [True, False])
def test_c25_a_device_store_of_another_request_follows_when_it_is_ready(success):
    world = World(8, ["a"])
    world.new_request("w", "r")
    world.ask_for_whole("a", "r")
    theirs = world.prepare_store("w", make_keys("ab"))
    assert world.prepare_store("r", make_keys("abc")).keys == make_keys("c")
    assert stores(world, "a", "r") == []
    world.complete_store(theirs.job_id, success=success)
    assert stores(world, "a", "r") == (make_keys("ab") if success else [])
    world.settle()
    assert not_stored(world, "r") == [("a", () if success else tuple(make_keys("ab")))]
    world.check_at_rest()


@pytest.mark.parametrize("answer", [Answer.OK, Answer.FAILED])
def test_c25_a_promotion_under_way_follows_when_it_is_ready(answer):
    world = World(8, ["a", "b"])
    world.new_request("w", store_tiers=["b"])
    world.new_request("p", "r")
    world.put("w", make_keys("ab"))
    world.reset(tiers=False)
    world.ask_for_whole("a", "r")
    for _ in range(
        2
    ):  # the first tier says no more than that it lacks the first block, until the second one has it
        world.lookup("p", make_keys("ab"))
        world.answer_all(JobHook.LOOKUP)
    world.lookup("p", make_keys("ab"))
    world.end_step()
    world.begin("r")
    world.prepare_store("r", make_keys("ab"))
    world.finish("r")
    assert not_stored(world, "r") == [], "the end waits for what follows (C26)"
    world.answer_all(JobHook.LOAD, answer=answer)
    assert sorted(stores(world, "a", "r")) == (make_keys("ab") if answer is Answer.OK else [])
    assert dict(not_stored(world, "r"))["a"] == (() if answer is Answer.OK else tuple(make_keys("ab")))


def test_c26_c25_the_end_comes_after_a_followed_device_store():
    world = World(8, ["a"])
    world.new_request("w", "r")
    world.ask_for_whole("a", "r")
    theirs = world.prepare_store("w", make_keys("a"))
    world.prepare_store("r", make_keys("a"))
    world.finish("r")
    assert not_stored(world, "r") == []
    world.complete_store(theirs.job_id)
    mine = [call.hook for call in world.hooks.calls if call.request == "r"]
    assert mine == ["on_new_request", "submit_store", "on_request_finished"]


@pytest.mark.parametrize("end", ["device deadline", "load deadline", "promoter leaves", "reset"])
def test_c26_c25_the_end_waits_for_nothing_that_will_never_come(end):
    world = World(8, ["a"], limits=generous_limits(8, device_timeout_s=5.0))
    world.new_request("w", "p", "r")
    world.ask_for_whole("a", "r")
    if end in ("load deadline", "promoter leaves"):
        world.put("w", make_keys("a"))
        world.reset(tiers=False)
        world.lookup("p", make_keys("a"))
    else:
        world.prepare_store("w", make_keys("a"))
    if end == "load deadline":
        world.end_step()
    world.begin("r")
    world.prepare_store("r", make_keys("a"))
    world.finish("r")
    assert not_stored(world, "r") == []
    match end:
        case "device deadline":
            world.advance(5.0)
        case "load deadline":
            world.advance(30.0)
        case "promoter leaves":
            world.finish("p")
        case "reset":
            world.reset()
    assert not_stored(world, "r") == [("a", () if end == "reset" else tuple(make_keys("a")))]


def test_c20_c25_a_block_stored_by_the_request_itself_comes_once_though_it_is_offered_twice():
    world = World(8, ["a"])
    world.new_request("r", remote_decode=True)
    prepared = world.prepare_store("r", make_keys("ab"))
    world.prepare_store("r", make_keys("ab"))  # preempted, and offered again
    world.complete_store(prepared.job_id)
    assert sorted(stores(world, "a", "r")) == make_keys("ab")
    world.settle()
    world.check_at_rest()


# -- pressure


def test_c25_c28_whole_requests_wait_while_the_blocks_of_others_are_dropped():
    world = World(8, [TierScript.limited("a", max_cascade=0.25)])
    world.new_request("w", "r")
    world.ask_for_whole("a", "r")
    world.put("r", make_keys("abcd"), cascade=False)
    world.put("w", make_keys("e"), cascade=False)
    assert len(stores(world, "a", "r")) == 2
    world.answer_all(JobHook.STORE)
    assert sorted(stores(world, "a", "r")) == make_keys("abcd")
    assert stores(world, "a", "w") == []
    assert world.coordinator.counters.tiers["a"].dropped == 1
    world.answer_all(JobHook.STORE)
    world.put("w", make_keys("f"))
    assert stores(world, "a", "w") == make_keys("f"), "nothing waits any more"


def test_c25_a_block_that_waits_is_evictable_and_told_as_not_stored():
    world = World(4, [TierScript.limited("a", max_cascade=0.25)])
    world.new_request("w", store_tiers=[])
    world.new_request("r", remote_decode=True)
    world.put("r", make_keys("abc"), cascade=False)
    assert stores(world, "a", "r") == make_keys("a")
    world.finish("r")
    world.put("w", make_keys("xy"), cascade=False)  # evicts the tail, c
    world.answer_all(JobHook.STORE)
    world.answer_all(JobHook.STORE)
    assert stores(world, "a", "r") == make_keys("ab")
    assert not_stored(world, "r") == [("a", tuple(make_keys("c")))]
    world.settle()
    world.check_at_rest()


def test_c25_c31_what_waits_for_a_tier_that_hangs_ends_with_the_stores_deadline_and_the_breaker():
    world = World(8, [TierScript.limited("a", max_cascade=0.125, breaker_failures=2)])
    world.new_request("r", remote_decode=True)
    world.put("r", make_keys("abcde"), cascade=False)
    world.finish("r")
    world.advance(60.0)
    assert not_stored(world, "r") == []
    world.advance(60.0)
    assert not_stored(world, "r") == [("a", tuple(make_keys("cde")))]


def test_c25_the_blocks_that_wait_are_limited():
    world = World(16, [TierScript.limited("a", max_cascade=0.0625, max_late_blocks=2)])
    world.new_request("r", remote_decode=True)
    world.put("r", make_keys("abcdef"))
    world.settle()
    assert stores(world, "a", "r") == make_keys("abc")
    assert not_stored(world, "r") == [("a", tuple(make_keys("def")))]


def test_c25_a_tier_out_of_the_path_gets_nothing_and_is_told_so():
    world = world_with("ab", 8)
    world.ask_for_whole("a", "r")
    for _ in range(3):
        world.fault("a")
    world.prepare_store("r", make_keys("ab"))
    world.finish("r")
    assert not_stored(world, "r") == [("a", tuple(make_keys("ab")))]


def test_c03_c25_a_row_gets_its_proof_once_also_when_two_requests_give_it_away(monkeypatch):
    world = World(4, ["a"])
    world.new_request("w", "r")
    world.put("w", make_keys("a"))
    sealed: list[bytes] = []
    monkeypatch.setattr(world, "_seal", lambda key, _row: sealed.append(key))
    world.ask_for_whole("a", "r")
    world.prepare_store("r", make_keys("a"))
    assert stores(world, "a", "r") == make_keys("a")
    assert sealed == []


def test_c03_c25_a_row_that_no_tier_took_before_is_sealed_when_one_asks():
    world = world_with("a", 4)
    world.ask_for_whole("a", "r")
    world.prepare_store("r", make_keys("a"))
    world.answer_all(JobHook.STORE)
    world.reset(tiers=False)
    assert world.fetch("w", make_keys("a")).hits == 1
