"""What a tier whose loads hang can take of the pool (C31): its quarantine, and all tiers together a share."""

from dataclasses import replace

import pytest

from kvtier_core.values import LookupState, MissReason
from tests.sim.scripted import JobHook, TierScript
from tests.sim.world import World, generous_limits, make_keys

HIT, PENDING, RETRY, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.RETRY, LookupState.MISS
PROMPTS = ["abcdefgh", "ijklmnop", "qrstuvwx", "ABCDEFGH"]


def world_behind(num_rows: int, *tiers: TierScript, **limits: float) -> World:
    """An empty pool in front of *tiers*, each of which holds one of ``PROMPTS``; a request for each has begun."""
    world = World(num_rows, tiers, limits=generous_limits(num_rows, **limits))
    for tier, prompt in zip(tiers, PROMPTS, strict=False):
        world.new_request(prompt, load_tiers=[tier.name], store_tiers=[tier.name])
        for key in make_keys(prompt):
            world.put(prompt, [key])
    world.reset(tiers=False)
    world.advance(60.0)
    return world


def tier(name: str, **limits: float) -> TierScript:
    """A tier that answers lookups without being asked, and is lent a tenth of the pool at first."""
    limits = {"max_quarantined": 0.1, "breaker_failures": 100, **limits}
    return replace(TierScript.limited(name, **limits), resident=True)


def states(world: World, request: str) -> list[LookupState]:
    """One lookup of a request's prompt; what it starts has left."""
    found = world.lookup(request, make_keys(request))
    world.end_step()
    return list(found.states)


def show_that_loads_come(world: World, request: str) -> None:
    """The tier of *request* answers its first load in time, and the pool is empty again."""
    states(world, request)
    world.answer_all(JobHook.LOAD)
    world.finish(request)
    world.reset(tiers=False)
    world.new_request(request, load_tiers=[request_tier(world, request)])


def request_tier(world: World, request: str) -> str:
    """The tier that holds the prompt of *request*."""
    return list(world.tiers)[PROMPTS.index(request)]


def quarantined(world: World) -> list[int]:
    """The rows that overdue loads of each tier hold."""
    return [tier.quarantined_rows for tier in world.coordinator.state.tiers.values()]


def test_c31_a_tier_that_never_loaded_anything_takes_no_more_than_its_quarantine():
    world = world_behind(20, tier("a"))
    assert states(world, PROMPTS[0]) == [PENDING, PENDING, RETRY]
    world.advance(30.0)
    assert quarantined(world) == [2]
    assert states(world, PROMPTS[0]) == [MISS]
    assert quarantined(world) == [2]


def test_c31_a_tier_whose_load_came_in_time_may_load_a_whole_prompt_at_once():
    world = world_behind(20, tier("a"))
    assert states(world, PROMPTS[0]) == [PENDING, PENDING, RETRY]
    world.answer_all(JobHook.LOAD)
    assert states(world, PROMPTS[0]) == [HIT] * 2 + [PENDING] * 6
    world.answer_all(JobHook.LOAD)
    assert states(world, PROMPTS[0]) == [HIT] * 8


def test_c31_a_tier_that_hung_once_is_lent_little_until_a_load_comes_in_time_again():
    world = world_behind(40, tier("a"))
    show_that_loads_come(world, PROMPTS[0])
    assert states(world, PROMPTS[0]) == [PENDING] * 8
    world.advance(30.0)
    assert quarantined(world) == [8], "its first wave, for it was trusted"
    world.answer_all(JobHook.LOAD)
    assert quarantined(world) == [0], "answered, but too late"
    world.advance(30.0)
    assert states(world, PROMPTS[0]) == [PENDING] * 4 + [RETRY]
    world.answer_all(JobHook.LOAD)
    assert states(world, PROMPTS[0]) == [HIT] * 4 + [PENDING] * 4


def test_c31_one_request_after_the_other_can_not_take_more_than_the_quarantine():
    world = world_behind(20, tier("a"))
    for name in "123":
        world.new_request(name)
        world.lookup(name, make_keys(PROMPTS[0]))
    world.end_step()
    world.advance(30.0)
    assert quarantined(world) == [2]


def test_c31_k6_who_waits_for_a_tier_to_show_itself_waits_no_longer_than_the_load_may_take():
    world = world_behind(20, tier("a"))
    world.new_request("other")
    assert states(world, PROMPTS[0]) == [PENDING, PENDING, RETRY]
    keys = make_keys(PROMPTS[0])[4:]
    assert list(world.lookup("other", keys).states) == [RETRY]
    world.advance(29.0)
    assert list(world.lookup("other", keys).states) == [RETRY]
    world.advance(1.0)
    found = world.lookup("other", keys)
    assert (list(found.states), found.reason) == ([MISS], MissReason.TIER_FAILED)


def test_c31_a_late_answer_shows_nothing():
    world = world_behind(20, tier("a"))
    states(world, PROMPTS[0])
    world.advance(30.0)
    world.answer_all(JobHook.LOAD)
    assert not world.coordinator.state.tiers["a"].loads_in_time


@pytest.mark.parametrize("num_tiers", [1, 2, 3, 4])
def test_c31_however_many_tiers_hang_a_share_of_the_pool_stays_for_stores(num_tiers):
    tiers = [tier(name) for name in "abcd"[:num_tiers]]
    world = world_behind(16, *tiers, max_promotion_rows=8, max_loading_rows=12)
    prompts = PROMPTS[:num_tiers]
    for prompt in prompts:
        show_that_loads_come(world, prompt)
    for _ in range(3):
        for prompt in prompts:
            states(world, prompt)
            world.advance(30.0)
        world.advance(60.0)
    assert sum(quarantined(world)) == (8 if num_tiers == 1 else 12)
    assert world.lookup(prompts[-1], make_keys(prompts[-1])).reason in (
        MissReason.TIER_FAILED,
        MissReason.PRIMARY_FULL,
    )
    world.new_request("s")
    prepared = world.prepare_store("s", make_keys("1234"))
    assert prepared is not None
    assert len(prepared.keys) == 4


def test_c31_when_the_hung_tiers_answer_the_pool_is_whole_again():
    world = world_behind(16, tier("a"), tier("b"), max_promotion_rows=8, max_loading_rows=12)
    for prompt in PROMPTS[:2]:
        show_that_loads_come(world, prompt)
    for prompt in PROMPTS[:2]:
        states(world, prompt)
        world.advance(30.0)
    assert quarantined(world) == [8, 4]
    world.answer_all(JobHook.LOAD)
    assert quarantined(world) == [0, 0]
    world.advance(60.0)
    assert world.fetch(PROMPTS[0], make_keys(PROMPTS[0])).hits == 8


def test_c21_behind_a_block_that_has_to_wait_for_its_tier_nothing_is_promoted():
    world = world_behind(20, tier("a"), tier("b"))
    world.new_request("r")
    both = make_keys("abc") + make_keys("i") + make_keys("d")
    assert list(world.lookup("r", both).states) == [PENDING, PENDING, RETRY]
    world.end_step()
    assert len(world.jobs(JobHook.LOAD, "a")) == 1
    assert world.jobs(JobHook.LOAD, "b") == []
