"""What a tier missed is made up for while it is idle and the pool still holds it (C28, V7)."""

from tests.sim.scripted import Answer, JobHook, TierScript
from tests.sim.world import World, make_keys

BURST = "abcdefgh"


def world_of(num_rows: int = 16, **limits: float) -> World:
    """A tier that takes a fourth of the pool at once."""
    return World(num_rows, [TierScript.limited("a", max_cascade=0.25, **limits)])


def burst(world: World, request: str = "r", keys: str = BURST) -> None:
    """A request stores more at once than its tier takes, and ends."""
    world.new_request(request)
    world.put(request, make_keys(keys), cascade=False)
    world.finish(request)


def go_idle(world: World) -> None:
    """The engine does nothing but take in what the tiers report."""
    while world.jobs(JobHook.STORE):
        world.answer_all(JobHook.STORE)
        world.advance(0.0)


def held(world: World) -> list[bytes]:
    """What the tier holds, in the order in which it came."""
    return list(world.tiers["a"].contents)


def test_v7_a_burst_reaches_the_tier_while_the_engine_is_idle():
    world = world_of()
    burst(world)
    counters = world.coordinator.counters.tiers["a"]
    assert counters.dropped == 4
    assert world.coordinator.is_catching_up
    go_idle(world)
    assert held(world) == make_keys(BURST)
    assert (counters.stored, counters.made_up) == (8, 4)
    assert not world.coordinator.is_catching_up
    world.check_at_rest()


def test_v7_a_large_burst_comes_in_several_jobs_within_the_limit():
    world = world_of(num_rows=56)
    keys = "".join(chr(ord("A") + number) for number in range(36))
    burst(world, keys=keys)
    go_idle(world)
    assert held(world) == make_keys(keys)


def test_v7_what_has_left_the_pool_is_not_made_up_for():
    world = world_of(num_rows=8)
    burst(world)
    world.new_request("s", store_tiers=[])
    prepared = world.prepare_store("s", make_keys("xy"))
    assert prepared is not None
    gone = set(prepared.evicted)
    assert gone
    world.complete_store(prepared.job_id)
    go_idle(world)
    assert set(held(world)) == set(make_keys(BURST)) - gone


def test_v7_a_tier_at_work_is_given_nothing_more():
    world = world_of()
    burst(world)
    world.advance(0.0)
    world.end_step()
    assert len(world.jobs(JobHook.STORE)) == 1


def test_v7_a_tier_that_is_back_in_the_path_gets_what_it_missed():
    world = world_of(breaker_failures=1, breaker_pause_s=1.0)
    burst(world, "q", "z")
    world.answer_all(JobHook.STORE, answer=Answer.ERROR)
    burst(world, "r", "ab")
    assert world.coordinator.counters.tiers["a"].dropped == 2
    assert not world.coordinator.is_catching_up
    world.advance(2.0)
    go_idle(world)
    assert held(world) == make_keys("ab")


def test_v7_what_was_stored_anew_and_given_meanwhile_comes_once():
    world = world_of(num_rows=8)
    burst(world)
    world.answer_all(JobHook.STORE)
    world.new_request("s", store_tiers=[])
    prepared = world.prepare_store("s", make_keys("wxyz"))
    assert prepared is not None
    world.complete_store(prepared.job_id)
    again = next(key for key in prepared.evicted if key not in held(world))
    world.new_request("t")
    prepared = world.prepare_store("t", [again])
    assert prepared is not None
    world.complete_store(prepared.job_id)
    world.answer_all(JobHook.STORE)
    assert again in held(world)
    world.advance(0.0)
    go_idle(world)
    assert world.coordinator.counters.tiers["a"].stored == len(held(world))


def test_v7_a_reset_forgets_what_was_missed():
    world = world_of()
    burst(world)
    world.reset()
    go_idle(world)
    assert held(world) == []


def test_v7_what_is_made_up_for_comes_as_a_request_of_its_own():
    world = world_of()
    burst(world)
    go_idle(world)
    told = [call.request for call in world.hooks.calls if call.hook == "on_new_request"]
    assert told[0] == "r"
    assert [name.partition("~")[0] for name in told] == ["r", "r"]
    own = [call.hook for call in world.hooks.calls if call.request == told[1]]
    assert sorted(own) == ["on_new_request", "on_request_finished", "submit_store"]
    assert own[0] == "on_new_request"
