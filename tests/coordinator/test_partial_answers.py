"""C22b: what a tier could tell of a lookup counts, and the rest is neither a hit nor remembered as absent."""

from kvtier_core.values import JobResult, LookupState, MissReason
from tests.coordinator.test_promotions import asked, states, world_behind
from tests.sim.scripted import JobHook, TierScript
from tests.sim.world import World, make_keys

HIT, PENDING, RETRY, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.RETRY, LookupState.MISS


def answer(world: World, *present: bool | None, failed: str = "") -> None:
    """The one question under way is answered so."""
    (job,) = world.jobs(JobHook.LOOKUP)
    world.running.pop(job)
    world.report(JobResult(job_id=job, present=list(present), failed=make_keys(failed)))


def test_s2_what_was_told_in_time_is_a_hit_and_the_rest_is_asked_again():
    world = world_behind("abcd", 8)
    assert states(world, "r", "abcd") == [RETRY]
    answer(world, True, True, None, True)
    assert states(world, "r", "abcd") == [PENDING, PENDING, RETRY]
    assert asked(world, "lookup") == [tuple(make_keys("abcd")), tuple(make_keys("c"))]
    world.advance(2.0)
    assert states(world, "r", "abcd") == [PENDING, PENDING, MISS]
    assert world.coordinator.misses("r") == {make_keys("c")[0]: MissReason.TIER_SLOW}


def test_s2_what_was_not_answered_is_asked_of_the_tier_by_the_next_request():
    world = world_behind("ab", 8)
    assert states(world, "r", "ab") == [RETRY]
    world.advance(2.0)
    assert states(world, "r", "ab") == [MISS]
    world.new_request("s")
    assert states(world, "s", "ab") == [RETRY]
    world.answer(world.jobs(JobHook.LOOKUP)[-1])
    assert states(world, "s", "ab") == [PENDING, PENDING]


def test_s2_a_request_that_waited_in_vain_does_not_wait_again():
    world = world_behind("ab", 8)
    keys = tuple(make_keys("ab"))
    assert not world.lookup("r", keys).is_settled
    world.advance(2.0)
    for _ in range(5):
        found = world.lookup("r", keys)
        assert (list(found.states), found.reason) == ([MISS], MissReason.TIER_SLOW)
        world.advance(0.5)
    assert len(asked(world, "lookup")) == 1


def test_s2_a_key_that_could_not_be_asked_about_costs_nothing_but_itself():
    world = world_behind("abc", 8)
    world.lookup("r", make_keys("abc"))
    answer(world, True, True, None, failed="c")
    assert states(world, "r", "abc") == [PENDING, PENDING, MISS]
    assert world.coordinator.misses("r") == {make_keys("c")[0]: MissReason.TIER_FAILED}


def test_s2_answers_that_tell_nothing_take_the_tier_out_of_the_path():
    world = world_behind("a", 8, TierScript.limited("a", breaker_failures=2))
    for name in ("s", "t", "u"):
        world.new_request(name)
    for name in ("s", "t"):
        assert states(world, name, "a") == [RETRY]
        answer(world, None)
    assert states(world, "u", "a") == [MISS]
    counters = world.coordinator.counters.tiers["a"]
    assert (counters.timeouts, counters.faults) == (2, 0)


def test_s2_a_late_part_of_an_answer_serves_later_requests():
    world = world_behind("ab", 8)
    world.lookup("r", make_keys("ab"))
    world.advance(2.0)
    answer(world, True, None)
    world.new_request("s")
    assert states(world, "s", "ab") == [PENDING, RETRY]


def test_b6_nothing_is_asked_behind_the_first_key_of_a_prefix_that_is_not_there():
    world = world_behind("ab", 8)
    assert states(world, "r", "abxcd") == [RETRY]
    answer(world, True, True, False, None, None)
    for _ in range(3):
        assert states(world, "r", "abxcd") == [PENDING, PENDING, MISS]
    world.new_request("s")
    assert states(world, "s", "abxyz") == [PENDING, PENDING, MISS], "keys behind a known miss"
    assert len(asked(world, "lookup")) == 1
    assert world.coordinator.counters.tiers["a"].timeouts == 0


def test_b6_a_tier_is_asked_again_behind_a_key_that_only_another_one_holds():
    world = world_behind("abcd", 8, "a", "b")
    for key in make_keys("bd"):
        del world.tiers["a"].contents[key]
    questions = 0
    while states(world, "r", "abcd") != [PENDING] * 4:
        world.answer_all(JobHook.LOOKUP)
        questions += 1
    assert questions == 2, "once more for all that follows, not for each key"
    assert asked(world, "lookup") == [tuple(make_keys("abcd")), tuple(make_keys("cd"))]
    world.end_step()
    assert asked(world, "submit_load") == [tuple(make_keys("ac"))]


def test_s10_that_a_block_is_absent_is_remembered_for_7_s():
    world = World(8, [TierScript(name="a")])
    world.new_request("r")
    for wait, questions in ((0.0, 1), (6.9, 1), (0.2, 2)):
        world.advance(wait)
        world.lookup("r", make_keys("x"))
        world.answer_all(JobHook.LOOKUP)
        assert len(asked(world, "lookup")) == questions
