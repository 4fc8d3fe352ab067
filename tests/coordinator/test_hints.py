"""What hints do in the pool: they keep blocks, bring them, and let them go. None changes an answer."""

import pytest

from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_core.hints import Hints
from kvtier_core.values import LookupState, MissReason
from tests.sim.scripted import JobHook
from tests.sim.world import World, generous_limits, make_keys


def world_of(num_rows: int = 8, *tiers: str, **limits: float) -> World:
    return World(num_rows, tiers, limits=generous_limits(num_rows, **{"max_pinned_rows": 4, **limits}))


def put(world: World, request: str, names: str, hints: Hints = Hints()) -> None:  # noqa: B008 - frozen
    """A whole request: it stores what is new, and is over."""
    world.new_request(request, hints=hints)
    world.begin(request)
    prepared = world.prepare_store(request, make_keys(names))
    if prepared.keys:
        world.complete_store(prepared.job_id)
        world.answer_all(JobHook.STORE)
    world.finish(request)


def kept(world: World, names: str) -> str:
    return "".join(
        name for name, key in zip(names, make_keys(names), strict=True) if world.ledger.find(key) is not None
    )


def test_pinned_blocks_stay_when_others_need_the_room():
    world = world_of()
    put(world, "pins", "ab", Hints(pin_s=60))
    for number in range(5):
        put(world, f"other {number}", "cdefgh")
        put(world, f"another {number}", "ijklmn")
    world.new_request("large")
    world.begin("large")
    assert world.prepare_store("large", make_keys("opqrstu")) is None
    assert kept(world, "ab") == "ab"
    assert world.coordinator.state.holds.num_pinned == 2


def test_pinned_blocks_leave_when_their_time_is_over():
    world = world_of()
    put(world, "pins", "ab", Hints(pin_s=60))
    world.advance(59)
    put(world, "other", "cdefghij"[:6])
    assert kept(world, "ab") == "ab"
    world.advance(1.5)
    put(world, "another", "klmnopqr")
    assert kept(world, "ab") == ""
    world.check_at_rest()


def test_pins_have_a_share_of_the_pool():
    world = world_of(max_pinned_rows=3)
    put(world, "pins", "abcde", Hints(pin_s=60))
    put(world, "also pins", "fg", Hints(pin_s=60))
    assert world.coordinator.state.holds.num_pinned == 3
    assert world.coordinator.counters.not_kept == 4
    put(world, "other", "hijkl")
    assert kept(world, "abcdefg") == "abc"


def test_of_a_prompt_the_first_bytes_are_pinned():
    world = world_of()
    put(world, "pins", "abcd", Hints(pin_s=60, pin_bytes=2))
    put(world, "other", "efghij")
    assert kept(world, "abcd") == "ab"


def test_a_pin_without_place_is_retained():
    world = world_of(max_pinned_rows=1)
    put(world, "pins", "ab", Hints(pin_s=60, retain_s=60))
    put(world, "plain", "cdefgh")
    put(world, "other", "ijklmn")
    assert kept(world, "ab") == "ab"
    put(world, "all", "opqrstu")
    assert kept(world, "ab") == "a"


def test_retained_blocks_leave_last_the_lowest_priority_and_the_ends_first():
    world = world_of()
    put(world, "high", "ab", Hints(retain_s=60, priority=2))
    put(world, "low", "cd", Hints(retain_s=60, priority=1))
    put(world, "plain", "efgh")
    put(world, "other", "ijkl")
    assert kept(world, "abcdefgh") == "abcd"
    put(world, "five", "mnopq")
    assert kept(world, "abcd") == "abc"
    put(world, "seven", "rstuvwx")
    assert kept(world, "abcd") == "a"
    put(world, "eight", "ABCDEFGH")
    assert kept(world, "abcd") == ""


def test_retained_blocks_give_way_to_what_a_request_loads():
    world = world_of(8, "x")
    put(world, "stored", "abcdefgh")
    world.reset(tiers=False)
    put(world, "retains", "ijkl", Hints(retain_s=60))
    world.new_request("loads")
    assert world.fetch("loads", make_keys("abcdefgh")).hits == 8
    assert kept(world, "ijkl") == ""


def test_a_load_keeps_what_it_loads():
    world = world_of()
    put(world, "plain", "ab")
    world.new_request("loads", hints=Hints(pin_s=60))
    assert world.fetch("loads", make_keys("ab")).hits == 2
    world.complete_load(world.prepare_load("loads", make_keys("ab")).job_id)
    world.finish("loads")
    put(world, "other", "cdefgh")
    put(world, "another", "ijklmn")
    assert kept(world, "ab") == "ab"


def test_an_offer_keeps_what_the_pool_holds_already():
    world = world_of()
    put(world, "plain", "ab")
    put(world, "pins", "abc", Hints(pin_s=60))
    put(world, "other", "defgh")
    put(world, "another", "ijklm")
    assert kept(world, "abc") == "abc"


def test_a_later_hint_takes_over_from_a_weaker_one():
    world = world_of()
    put(world, "retains", "ab", Hints(retain_s=10))
    put(world, "pins", "a", Hints(pin_s=60))
    put(world, "retains again", "ab", Hints(retain_s=20, priority=5))
    world.advance(30)
    put(world, "other", "cdefghi")
    assert kept(world, "ab") == "a"


@pytest.mark.parametrize("strong", [Hints(pin_s=1), Hints(retain_s=1, priority=51)])
@pytest.mark.parametrize("order", [0, 1])
def test_f5_a_hint_that_ends_soon_leaves_a_weaker_one_that_lasts(strong, order):
    world = world_of()
    for hints in [strong, Hints(retain_s=3600, priority=50)][:: 1 - 2 * order]:
        put(world, f"keeps {hints}", "ab", hints)
    world.advance(2)
    put(world, "other", "cdefgh")
    put(world, "another", "ijklmn")
    assert kept(world, "ab") == "ab"
    world.advance(3600)
    put(world, "all", "opqrstuv")
    world.check_at_rest()


def test_f5_what_a_request_pins_for_a_moment_it_retains_for_an_hour():
    world = world_of()
    put(world, "keeps", "ab", Hints(retain_s=3600, pin_s=1))
    assert world.coordinator.state.holds.num_pinned == 2
    world.advance(2)
    assert world.coordinator.state.holds.num_pinned == 0
    put(world, "other", "cdefgh")
    put(world, "another", "ijklmn")
    assert kept(world, "ab") == "ab"
    put(world, "all", "opqrstuv")
    assert kept(world, "ab") == ""
    world.check_at_rest()


def test_the_number_of_hints_that_keep_is_bounded():
    world = world_of(max_holds=1)
    put(world, "pins", "a", Hints(pin_s=60))
    put(world, "also pins", "b", Hints(pin_s=60))
    assert world.coordinator.counters.not_kept == 1
    put(world, "other", "cdefghi")
    assert kept(world, "ab") == "a"


def test_a_reset_ends_what_hints_keep():
    world = world_of()
    put(world, "pins", "ab", Hints(pin_s=60))
    world.reset()
    assert not world.coordinator.state.holds
    put(world, "other", "cdefghij")
    world.check_at_rest()


def test_a_failed_store_keeps_nothing():
    world = world_of()
    world.new_request("pins", hints=Hints(pin_s=60))
    prepared = world.prepare_store("pins", make_keys("ab"))
    assert world.coordinator.state.holds.num_pinned == 2
    world.complete_store(prepared.job_id, success=False)
    assert not world.coordinator.state.holds


def test_what_is_dropped_reaches_no_tier_and_leaves_at_the_end():
    world = world_of(8, "x")
    put(world, "plain", "ab")
    world.new_request("drops", hints=Hints(drop=True))
    assert world.fetch("drops", make_keys("abcd")).hits == 2
    world.complete_load(world.prepare_load("drops", make_keys("ab")).job_id)
    world.put("drops", make_keys("cd"))
    assert kept(world, "abcd") == "abcd"
    world.finish("drops")
    assert kept(world, "abcd") == "ab"
    assert set(world.tiers["x"].contents) == set(make_keys("ab"))


def test_what_another_request_used_is_not_dropped():
    world = world_of(8, "x")
    world.new_request("drops", "uses", "waits", hints=Hints(drop=True))
    world.put("drops", make_keys("abc"))
    assert world.fetch("uses", make_keys("ab")).hits == 2
    world.complete_load(world.prepare_load("uses", make_keys("a")).job_id)
    world.finish("drops")
    assert kept(world, "abc") == "ab"  # one was used, one is promised


def test_a_store_that_ends_after_its_request_is_dropped():
    world = world_of(8, "x")
    world.new_request("drops", hints=Hints(drop=True))
    world.begin("drops")
    prepared = world.prepare_store("drops", make_keys("ab"))
    world.finish("drops")
    world.complete_store(prepared.job_id)
    assert kept(world, "ab") == ""
    world.check_at_rest()


def test_what_another_node_goes_on_with_is_given_to_tiers_all_the_same():
    world = world_of(8, "x")
    world.new_request("drops", hints=Hints(drop=True), remote_decode=True)
    world.put("drops", make_keys("ab"))
    assert set(world.tiers["x"].contents) == set(make_keys("ab"))


def test_a_prefetch_brings_blocks_that_nobody_asks_for():
    world = world_of(8, "x")
    put(world, "stored", "abcd")
    world.reset(tiers=False)
    world.new_request("waits", hints=Hints(prefetch=True))
    world.prefetch("waits", (tuple(make_keys("abcde")),))
    for _ in range(4):
        world.end_step()
        world.answer_all(JobHook.LOOKUP)
        world.answer_all(JobHook.LOAD)
    assert kept(world, "abcde") == "abcd"
    assert not world.ledger.leases
    found = world.lookup("waits", make_keys("abcde"))
    assert (found.hits, found.reason) == (4, MissReason.NOT_STORED)


def test_a_prefetch_ends_when_its_request_asks_or_is_over():
    world = world_of(8, "x")
    put(world, "stored", "ab")
    world.reset(tiers=False)
    world.new_request("asks", "ends")
    for name in ("asks", "ends"):
        world.prefetch(name, (tuple(make_keys("ab")),))
    world.lookup("asks", make_keys("ab"))
    world.finish("ends")
    world.end_step()
    assert len(world.jobs(JobHook.LOAD)) == 1
    world.answer_all(JobHook.LOAD)
    world.end_step()
    assert not world.jobs(JobHook.LOAD)
    world.settle()
    world.check_at_rest()


def test_prefetches_come_one_after_another():
    world = world_of(8, "x")
    put(world, "stored", "ab")
    put(world, "also stored", "cd")
    world.reset(tiers=False)
    world.new_request("first", "second")
    world.prefetch("first", (tuple(make_keys("ab")),))
    world.prefetch("second", (tuple(make_keys("cd")),))
    world.end_step()
    (load,) = world.jobs(JobHook.LOAD)
    assert list(world.running[load].job.keys) == make_keys("ab")
    for _ in range(8):
        world.answer_all(JobHook.LOOKUP)
        world.answer_all(JobHook.LOAD)
        world.end_step()
    assert kept(world, "abcd") == "abcd"


@pytest.mark.parametrize("hints", [Hints(pin_s=60), Hints(retain_s=60), Hints(drop=True)])
def test_answers_are_the_same(hints):
    answers = []
    for said in (Hints(), hints):
        world = World(8, ("x",), groups=(GroupShape(), GroupShape(window=2)))
        keys = (make_keys("abcd"), make_keys("abcd", 1))
        world.new_request("one", "two", hints=said)
        world.put("one", [*keys[0], *keys[1]])
        answers.append(world.find_end_point("two", keys))
    assert answers[0] == answers[1]
    assert answers[0].state is LookupState.HIT


def test_hints_are_counted():
    world = world_of()
    world.new_request("one", hints=Hints(pin_s=1, drop=True, num_unknown=2))
    world.new_request("two", hints=Hints(retain_s=1, prefetch=True))
    assert world.coordinator.counters.hints == {"pin": 1, "drop": 1, "unknown": 2, "retain": 1, "prefetch": 1}
