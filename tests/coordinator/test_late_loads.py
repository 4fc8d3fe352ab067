"""A load that passes its deadline: what has come of it counts, the rest is a miss (C23, B8)."""

from dataclasses import replace

from kvtier_core.values import LookupState
from tests.coordinator.test_promotions import states, world_behind
from tests.sim.scripted import Answer, JobHook, TierScript
from tests.sim.world import World, make_keys

HIT, PENDING, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.MISS
BEHIND = replace(TierScript.limited("a", max_quarantined=1.0), resident=True)


def overdue_world(arrived: str, num_rows: int = 4) -> tuple[World, int]:
    """A load of "abcd" whose deadline has passed after these had come; and its job."""
    world = world_behind("abcd", num_rows, BEHIND)
    assert states(world, "r", "abcd") == [PENDING] * 4
    world.end_step()
    (job,) = world.jobs(JobHook.LOAD)
    world.arrive(job, make_keys(arrived))
    world.advance(30.0)
    return world, job


def test_b8_what_came_before_the_deadline_is_a_hit_and_the_rest_is_a_miss():
    world, _ = overdue_world("ab")
    assert states(world, "r", "abcd") == [HIT, HIT, MISS]
    prepared = world.prepare_load("r", make_keys("ab"))
    assert list(prepared.keys) == make_keys("ab")
    assert prepared.sources == ["a", "a"]
    world.complete_load(prepared.job_id)
    assert world.coordinator.counters.tiers["a"].loaded == 2


def test_b8_others_get_what_came_too():
    world, _ = overdue_world("ab")
    world.finish("r")
    world.new_request("s")
    assert states(world, "s", "abcd") == [HIT, HIT, MISS]


def test_b8_a_row_that_came_holds_nothing_else_until_the_tier_answers():
    world, job = overdue_world("ab")
    world.finish("r", "w")
    world.new_request("s")
    assert world.prepare_store("s", make_keys("x")) is None
    assert world.coordinator.state.quarantined_rows == 4
    world.answer(job)
    assert world.coordinator.state.quarantined_rows == 0
    world.put("s", make_keys("wxyz"))


def test_b8_a_result_that_takes_back_what_came_makes_it_a_miss():
    world, job = overdue_world("ab")
    world.answer(job, Answer.FAILED, make_keys("a"))
    assert states(world, "r", "ab") == [MISS]
    world.settle()
    world.check_at_rest()


def test_b8_a_block_in_use_when_it_is_taken_back_frees_its_row_when_the_reader_is_done():
    world, job = overdue_world("ab")
    assert states(world, "r", "ab") == [HIT, HIT]
    prepared = world.prepare_load("r", make_keys("ab"))
    world.answer(job, Answer.FAILED, make_keys("a"))
    world.complete_load(prepared.job_id)
    world.settle()
    world.check_at_rest()


def test_b8_a_reset_parts_what_came_as_all_else():
    world, job = overdue_world("abcd")
    world.reset()
    assert states(world, "r", "a") == [MISS]
    world.answer(job)
    world.settle()
    world.check_at_rest()


def test_b8_what_came_waits_for_the_deadline_while_its_tier_may_be_in_time():
    world = world_behind("ab", 4, BEHIND)
    states(world, "r", "ab")
    world.end_step()
    world.arrive(world.jobs(JobHook.LOAD)[0], make_keys("a"))
    assert states(world, "r", "ab") == [PENDING, PENDING]
