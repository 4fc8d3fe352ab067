"""Promotions (C21 to C23, K6): what is asked of which tier, what is reserved for it, and how every wait ends."""

from functools import partial

import pytest

from kvtier_core.values import LookupState, MissReason
from tests.coordinator.test_groups import count_calls
from tests.sim.scripted import Answer, JobHook, TierScript
from tests.sim.world import World, generous_limits, make_keys

HIT, PENDING, RETRY, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.RETRY, LookupState.MISS


def world_behind(keys: str, num_rows: int, *tiers: TierScript | str, **limits: float) -> World:
    """An empty pool in front of *tiers*, each of which holds *keys*; a request "r" has begun."""
    world = World(num_rows, tiers or ["a"], limits=generous_limits(num_rows, **limits))
    world.new_request("w", "r")
    for key in make_keys(keys):
        world.put("w", [key])
    world.reset(tiers=False)
    world.begin("w")
    world.hooks.calls.clear()
    world.advance(60.0)  # what was stored is no longer known without asking
    return world


def asked(world: World, hook: str, tier: str = "a") -> list[tuple[bytes, ...]]:
    """The keys of each call of one hook of one tier."""
    return [call.keys for call in world.hooks.calls if (call.hook, call.tier) == (hook, tier)]


def states(world: World, request: str, keys: str) -> list[LookupState]:
    """One lookup's answers."""
    return list(world.lookup(request, make_keys(keys)).states)


# -- from RETRY to HIT


def test_c21_a_block_behind_goes_from_retry_over_pending_to_hit():
    world = world_behind("ab", 4)
    assert states(world, "r", "ab") == [RETRY]
    world.answer_all(JobHook.LOOKUP)
    assert states(world, "r", "ab") == [PENDING, PENDING]
    world.end_step()
    world.answer_all(JobHook.LOAD)
    assert states(world, "r", "ab") == [HIT, HIT]


def test_c21_a_resident_set_answers_without_asking():
    world = world_behind("ab", 4, TierScript(name="a", resident=True))
    assert states(world, "r", "abz") == [PENDING, PENDING, MISS]
    assert asked(world, "lookup") == []


def test_c21_a_tier_that_holds_more_than_it_remembers_is_asked():
    world = world_behind("ab", 4, TierScript(name="a", resident=True, remembers=1))
    assert states(world, "r", "ab") == [RETRY]


def test_c21_the_promotions_of_a_step_are_one_job():
    world = world_behind("abc", 4)
    world.lookup("r", make_keys("abc"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("r", make_keys("a"))
    world.lookup("r", make_keys("abc"))
    assert world.jobs(JobHook.LOAD) == [], "nothing leaves before the step ends"
    assert world.coordinator.has_pending_work
    world.end_step()
    assert asked(world, "submit_load") == [tuple(make_keys("abc"))]


def test_c21_rows_are_reserved_only_up_to_a_hole():
    world = world_behind("acd", 8)
    world.lookup("r", make_keys("abcd"))
    world.answer_all(JobHook.LOOKUP)
    assert states(world, "r", "abcd") == [PENDING, MISS]
    assert world.ledger.num_free == 7


def test_c21_no_row_is_reserved_behind_a_retry():
    world = world_behind("abc", 8)
    world.lookup("r", make_keys("ac"))
    world.answer_all(JobHook.LOOKUP)
    assert states(world, "r", "abc") == [PENDING, RETRY]
    assert world.ledger.num_free == 7


# -- several tiers


def test_c21_a_retry_of_one_tier_does_not_stop_later_ones_being_asked():
    world = world_behind("a", 4, "x", "y")
    world.lookup("r", make_keys("a"))
    assert (len(asked(world, "lookup", "x")), len(asked(world, "lookup", "y"))) == (1, 1)


def test_c21_a_later_tier_waits_for_the_earlier_ones_answer():
    world = world_behind("a", 4, "x", "y")
    world.lookup("r", make_keys("a"))
    world.answer_all(JobHook.LOOKUP, "y")
    assert states(world, "r", "a") == [RETRY]
    world.answer_all(JobHook.LOOKUP, "x")
    assert states(world, "r", "a") == [PENDING]
    world.end_step()
    assert (len(asked(world, "submit_load", "x")), len(asked(world, "submit_load", "y"))) == (1, 0)


def test_c21_a_later_tier_is_used_once_the_earlier_one_has_missed():
    world = world_behind("a", 4, "x", "y")
    world.tiers["x"].contents.clear()
    assert world.fetch("r", make_keys("a")).hits == 1
    assert (len(asked(world, "submit_load", "x")), len(asked(world, "submit_load", "y"))) == (0, 1)


def test_c21_a_later_tier_is_used_once_the_earlier_one_has_passed_its_deadline():
    world = world_behind("a", 4, "x", "y")
    world.lookup("r", make_keys("a"))
    world.answer_all(JobHook.LOOKUP, "y")
    world.advance(2.0)
    assert states(world, "r", "a") == [PENDING]
    world.end_step()
    assert len(asked(world, "submit_load", "y")) == 1


def test_c21_each_tier_gets_its_own_part_of_a_prefix():
    world = world_behind("ab", 4, "x", "y")
    del world.tiers["x"].contents[make_keys("b")[0]]
    assert world.fetch("r", make_keys("ab")).hits == 2
    assert asked(world, "submit_load", "x") == [tuple(make_keys("a"))]
    assert asked(world, "submit_load", "y") == [tuple(make_keys("b"))]


def test_c27_a_request_loads_only_from_the_tiers_it_may():
    world = world_behind("a", 4, "x", "y")
    world.new_request("s", load_tiers=["y"])
    assert world.fetch("s", make_keys("a")).hits == 1
    assert asked(world, "lookup", "x") == asked(world, "submit_load", "x") == []


# -- what fits


def test_c21_a_prefix_larger_than_the_pool_gets_what_fits_and_never_runs_in_circles():
    world = world_behind("abcdefgh", 4, max_promotion_rows=2)
    for _ in range(50):
        found = world.fetch("r", make_keys("abcdefgh"))
        assert (found.hits, found.reason) == (4, MissReason.PRIMARY_FULL)
    assert sum(len(keys) for keys in asked(world, "submit_load")) == 4


def test_c21_promotions_beyond_the_limit_come_in_waves():
    world = world_behind("abcde", 8, max_promotion_rows=2)
    world.lookup("r", make_keys("abcde"))
    world.answer_all(JobHook.LOOKUP)
    assert states(world, "r", "abcde") == [PENDING, PENDING, RETRY]
    assert world.fetch("r", make_keys("abcde")).hits == 5
    assert [len(keys) for keys in asked(world, "submit_load")] == [2, 2, 1]


def test_c22_promotions_held_by_another_request_are_primary_full():
    world = world_behind("abcd", 8, max_promotion_rows=2)
    world.new_request("s")
    world.lookup("r", make_keys("abcd"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("s", make_keys("ab"))
    found = world.lookup("r", make_keys("cd"))
    assert (list(found.states), found.reason) == ([MISS], MissReason.PRIMARY_FULL)


def test_k6_o2_c22_a_full_pool_is_a_miss_with_its_own_reason():
    world = world_behind("a", 2)
    world.put("w", make_keys("xy"), cascade=False)
    world.prepare_load("w", make_keys("xy"))
    found = world.fetch("r", make_keys("a"))
    assert (list(found.states), found.reason) == ([MISS], MissReason.PRIMARY_FULL)
    assert asked(world, "submit_load") == []


def test_c13_no_promotion_evicts_a_leased_row():
    world = world_behind("ab", 2)
    world.put("w", make_keys("x"))
    world.new_request("s")
    assert states(world, "s", "x") == [HIT]
    found = world.fetch("r", make_keys("ab"))
    assert (found.hits, found.reason) == (1, MissReason.PRIMARY_FULL)
    assert states(world, "s", "x") == [HIT]


def test_c13_a_promotion_does_not_evict_the_hits_of_its_own_prefix():
    world = world_behind("b", 2)
    world.put("w", make_keys("a"))
    world.put("w", make_keys("x"))
    assert world.fetch("r", make_keys("ab")).hits == 2


def test_c13_a_request_that_waits_for_a_promotion_keeps_its_leases():
    world = world_behind("b", 2, lease_timeout_s=1.0)
    world.put("w", make_keys("a"))
    world.lookup("r", make_keys("ab"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("r", make_keys("ab"))
    world.end_step()
    world.advance(5.0)
    assert world.prepare_store("w", make_keys("x")) is None
    world.answer_all(JobHook.LOAD)
    assert states(world, "r", "ab") == [HIT, HIT]


# -- shared promotions


def promoting(world: World, *, left: bool) -> None:
    """Request "r" promotes "a" while "s" waits for it; with *left* the job has left."""
    world.new_request("s")
    world.lookup("r", make_keys("a"))
    world.answer_all(JobHook.LOOKUP)
    assert states(world, "r", "a") == [PENDING]
    assert states(world, "s", "a") == [PENDING]
    if left:
        world.end_step()


def test_c21_another_requests_promotion_is_pending_and_not_started_twice():
    world = world_behind("a", 4)
    promoting(world, left=True)
    world.end_step()
    assert len(asked(world, "submit_load")) == 1
    world.answer_all(JobHook.LOAD)
    assert states(world, "r", "a") == states(world, "s", "a") == [HIT]


@pytest.mark.parametrize("left", [False, True])
def test_c21_a_waiting_request_keeps_a_promotion_whose_owner_goes(left):
    world = world_behind("a", 1)
    promoting(world, left=left)
    world.finish("r")
    world.end_step()
    world.answer_all(JobHook.LOAD)
    assert len(asked(world, "submit_load")) == 1
    assert states(world, "s", "a") == [HIT]
    assert world.prepare_store("w", make_keys("x")) is None, "s holds the lease"


def test_c21_a_promotion_nobody_waits_for_is_taken_back_before_it_leaves():
    world = world_behind("a", 1)
    promoting(world, left=False)
    world.finish("s", "r")
    world.end_step()
    assert asked(world, "submit_load") == []
    assert world.ledger.num_free == 1


def test_c21_c26_a_promotion_handed_over_leaves_under_the_heirs_name():
    world = world_behind("a", 1)
    promoting(world, left=False)
    world.finish("r")
    world.end_step()
    assert [call.request for call in world.hooks.calls if call.hook == "submit_load"] == ["s"]


def test_c27_a_promotion_is_not_handed_to_a_request_that_may_not_load_from_that_tier():
    world = world_behind("a", 1, "x", "y")
    world.new_request("s", load_tiers=["y"])
    world.lookup("r", make_keys("a"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("r", make_keys("a"))
    assert states(world, "s", "a") == [PENDING]
    world.finish("r")
    world.end_step()
    assert asked(world, "submit_load", "x") == []
    assert world.fetch("s", make_keys("a")).hits == 1


@pytest.mark.parametrize("waiting", [0, 3])
def test_k11_ending_a_request_with_reservations_makes_no_call_for_others_that_do_not_wait_for_them(waiting):
    calls = {}
    for others in (1, 200):
        world = world_behind("abcdefgh", 16)
        world.new_request(*map(str, range(others)), "s", "t", "u")
        keys = make_keys("abcdefgh")
        world.lookup("r", keys)
        world.answer_all(JobHook.LOOKUP)
        world.lookup("r", keys)
        for name in "stu"[:waiting]:
            assert states(world, name, "abcdefgh") == [PENDING] * 8
        calls[others] = count_calls(partial(world.coordinator.request_finished, "r"))
        world.end_step()
        assert len(asked(world, "submit_load")) == (1 if waiting else 0)
    assert calls[200] == calls[1]


# -- partial success and other bad ends


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer.MISSING, MissReason.NOT_STORED),
        (Answer.FAILED, MissReason.TIER_FAILED),
        (Answer.CORRUPT, MissReason.INTEGRITY),
    ],
)
def test_c23_what_loaded_is_kept_and_the_rest_is_a_miss(answer, reason):
    world = world_behind("abc", 4)
    world.lookup("r", make_keys("abc"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("r", make_keys("abc"))
    world.end_step()
    world.answer(world.jobs(JobHook.LOAD)[0], answer, make_keys("b"))
    found = world.lookup("r", make_keys("abc"))
    assert (list(found.states), found.reason) == ([HIT, MISS], reason)
    assert states(world, "r", "c") == [HIT]
    assert world.ledger.num_free == 2


@pytest.mark.parametrize("answer", [Answer.CORRUPT, Answer.FAILED, Answer.MISSING, Answer.LIE, Answer.ERROR])
@pytest.mark.parametrize("resident", [False, True])
def test_k6_o1_a_bad_block_is_loaded_once_and_then_missed(answer, resident):
    world = world_behind("a", 4, TierScript(name="a", resident=resident))
    for _ in range(100):
        world.lookup("r", make_keys("a"))
        world.answer_all(JobHook.LOOKUP)
        world.end_step()
        world.answer_all(JobHook.LOAD, answer=answer)
        world.advance(0.1)
    assert len(asked(world, "submit_load")) == 1
    assert states(world, "r", "a") == [MISS]


@pytest.mark.parametrize("miss_ttl", [0.0, 0.001])
@pytest.mark.parametrize("answer", [Answer.MISSING, Answer.FAILED, None])
@pytest.mark.parametrize("names", ["r", "rstu"])
def test_k6_o1_however_soon_a_lost_key_may_be_asked_for_again_no_request_waits_for_it_twice(
    miss_ttl, answer, names
):
    tier = TierScript.limited("a", miss_ttl=miss_ttl, load_timeout=0.05, breaker_failures=1000)
    world = world_behind("a", 4, tier)
    world.new_request(*names[1:])
    keys = tuple(make_keys("a"))
    for number in range(30):
        for name in names:
            settled = world.lookup(name, keys).is_settled
            assert settled or number < 20, "each request may wait for every other one's load, and no longer"
        world.answer_all(JobHook.LOOKUP)
        world.end_step()
        if answer is not None:
            world.answer_all(JobHook.LOAD, answer=answer)
        world.advance(0.1)
    assert len(asked(world, "submit_load")) <= len(names)
    world.answer_all(JobHook.LOAD)
    world.new_request("next")
    assert world.fetch("next", keys).hits == 1, "the next request tries again"


def test_k6_c23_a_request_that_stored_a_lost_key_itself_may_load_it():
    world = world_behind("a", 4, TierScript.limited("a", miss_ttl=0.0))
    world.lookup("r", make_keys("a"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("r", make_keys("a"))
    world.end_step()
    world.answer_all(JobHook.LOAD, answer=Answer.FAILED)
    assert states(world, "r", "a") == [MISS]
    world.put("r", make_keys("a"))
    world.new_request("s")
    world.put("s", make_keys("wxyz"))
    world.finish("s")
    assert world.fetch("r", make_keys("a")).hits == 1


@pytest.mark.parametrize("answer", [Answer.CORRUPT, Answer.FAILED, Answer.MISSING])
def test_k6_o1_a_bad_block_is_loaded_once_for_all_requests(answer):
    world = world_behind("a", 4)
    for name in "12345":
        world.new_request(name)
        for _ in range(3):
            world.lookup(name, make_keys("a"))
            world.answer_all(JobHook.LOOKUP)
            world.end_step()
            world.answer_all(JobHook.LOAD, answer=answer)
        assert states(world, name, "a") == [MISS]
    assert len(asked(world, "submit_load")) == 1


def test_c23_a_lost_key_is_asked_again_after_a_while():
    world = world_behind("a", 4, TierScript.limited("a", miss_ttl=10.0))
    world.lookup("r", make_keys("a"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("r", make_keys("a"))
    world.end_step()
    world.answer_all(JobHook.LOAD, answer=Answer.FAILED)
    assert states(world, "r", "a") == [MISS]
    world.advance(10.0)
    assert world.fetch("r", make_keys("a")).hits == 1


def test_c23_k2_o1_a_later_store_makes_a_lost_key_loadable_at_once():
    world = world_behind("a", 4)
    world.lookup("r", make_keys("a"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("r", make_keys("a"))
    world.end_step()
    world.answer_all(JobHook.LOAD, answer=Answer.CORRUPT)
    assert states(world, "r", "a") == [MISS]
    world.put("r", make_keys("a"))
    world.reset(tiers=False)
    assert world.fetch("r", make_keys("a")).hits == 1


def test_c60_counters_of_a_load_add_up():
    world = world_behind("abcd", 4)
    world.lookup("r", make_keys("abcd"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("r", make_keys("abcd"))
    world.end_step()
    del world.tiers["a"].contents[make_keys("d")[0]]
    world.answer(world.jobs(JobHook.LOAD)[0], Answer.FAILED, make_keys("bc"))
    counters = world.coordinator.counters.tiers["a"]
    assert (counters.loaded, counters.load_failed, counters.load_missing, counters.integrity) == (1, 2, 1, 0)


# -- deadlines


def test_k6_o3_an_unanswered_lookup_is_a_miss_at_its_deadline():
    world = World(4, ["a"])
    names = [f"r{i}" for i in range(100)]
    world.new_request(*names)
    for name in names:
        assert states(world, name, "z") == [RETRY]
    world.advance(2.0)
    for name in names:
        found = world.lookup(name, make_keys("z"))
        assert (list(found.states), found.reason) == ([MISS], MissReason.TIER_SLOW)
    assert len(asked(world, "lookup")) == 1


def test_k6_o3_a_late_answer_serves_later_requests():
    world = world_behind("a", 4)
    world.lookup("r", make_keys("a"))
    world.advance(5.0)
    assert states(world, "r", "a") == [MISS]
    world.answer_all(JobHook.LOOKUP)
    world.new_request("s")
    assert states(world, "s", "a") == [PENDING]
    assert len(asked(world, "lookup")) == 1


def test_k6_o3_answers_that_lapse_at_once_do_not_make_a_request_wait_for_ever():
    world = world_behind("ab", 4, TierScript.limited("x", presence_ttl_s=0.0), "y")
    answers = []
    for _ in range(20):
        answers.append(world.lookup("r", make_keys("ab")))
        world.answer_all(JobHook.LOOKUP)
        world.advance(5.0)
    assert any(answer.is_settled for answer in answers)


def test_c23_a_load_past_its_deadline_is_a_miss_and_its_key_may_be_stored_elsewhere():
    world = world_behind("a", 2)
    world.lookup("r", make_keys("a"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("r", make_keys("a"))
    world.end_step()
    old_row = world.running[world.jobs(JobHook.LOAD)[0]].job.rows[0]
    world.advance(30.0)
    found = world.lookup("r", make_keys("a"))
    assert (list(found.states), found.reason) == ([MISS], MissReason.TIER_SLOW)
    world.put("r", make_keys("a"))
    new_row = world.ledger.find(make_keys("a")[0]).row
    assert new_row != old_row
    world.scribble(world.jobs(JobHook.LOAD)[0])
    assert world.ledger.num_free == 0
    world.answer_all(JobHook.LOAD)
    assert world.ledger.num_free == 1
    assert world.ledger.find(make_keys("a")[0]).row == new_row
    assert states(world, "r", "a") == [HIT]


def test_c31_an_overdue_load_is_cancelled_and_is_not_pending_work():
    world = world_behind("a", 2)
    world.lookup("r", make_keys("a"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("r", make_keys("a"))
    world.end_step()
    assert world.coordinator.has_pending_work
    assert world.coordinator.next_deadline() == world.now + 30.0
    world.advance(30.0)
    assert world.running[world.jobs(JobHook.LOAD)[0]].is_cancelled
    assert not world.coordinator.has_pending_work
    assert world.coordinator.next_deadline() is None


def test_c60_the_more_telling_of_two_tiers_reasons_is_given():
    world = world_behind("a", 4, "x", "y")
    world.tiers["y"].contents.clear()
    world.lookup("r", make_keys("a"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("r", make_keys("a"))
    world.end_step()
    world.answer_all(JobHook.LOAD, answer=Answer.CORRUPT)
    assert world.lookup("r", make_keys("a")).reason is MissReason.INTEGRITY


def test_k6_o3_a_request_that_was_kept_waiting_once_may_wait_again_later():
    world = world_behind("a", 4)
    world.lookup("r", make_keys("z"))
    world.advance(2.0)
    assert world.lookup("r", make_keys("z")).is_settled
    assert states(world, "r", "a") == [RETRY]
    world.answer_all(JobHook.LOOKUP)
    assert states(world, "r", "a") == [PENDING]
