"""Admission (C15): which offered blocks the pool and the tiers take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.coordinator.admission import Admission
from kvtier_core.values import LookupState, MissReason
from tests.sim.scripted import Answer, JobHook, TierScript
from tests.sim.world import World, generous_limits, make_keys

# -- the counting alone


def offer(admission: Admission, keys: str) -> list[str]:
    """A new request offers *keys*; returns those that were counted."""
    return [key[31:32].decode() for key in admission.offer(make_keys(keys), set())]


def admitted(admission: Admission, keys: str) -> str:
    taken = admission.admitted_to_pool(make_keys(keys))
    return "".join(key[31:32].decode() for key in taken)


def test_c15_a_key_is_admitted_at_its_threshold_and_not_before():
    admission = Admission(3, [], 100)
    assert admitted(admission, "a") == ""
    for expected in ("", "", "a", "a"):
        offer(admission, "a")
        assert admitted(admission, "ab") == expected


def test_c15_without_a_threshold_nothing_is_counted_and_all_is_admitted():
    admission = Admission(1, [1, 1], 100)
    assert offer(admission, "abc") == []
    assert admitted(admission, "abc") == "abc"
    assert not admission.is_below(make_keys("a")[0])


def test_c15_one_request_counts_once():
    admission = Admission(2, [], 100)
    counted: set = set()
    assert admission.offer(make_keys("aba"), counted) == make_keys("ab")
    assert admission.offer(make_keys("abc"), counted) == make_keys("c")
    assert admitted(admission, "abc") == ""
    offer(admission, "a")
    assert admitted(admission, "abc") == "a"


def test_c15_the_key_offered_longest_ago_is_forgotten_first():
    admission = Admission(2, [], 3)
    offer(admission, "abc")
    offer(admission, "a")  # the newest now
    offer(admission, "d")  # b goes
    offer(admission, "bcd")
    assert admitted(admission, "abcd") == "cd"


def test_c15_keys_of_the_offer_in_hand_are_never_dropped():
    admission = Admission(2, [], 3)
    offer(admission, "abc")
    offer(admission, "cxyz")  # c is known; two more fit, z has no room
    offer(admission, "cxyz")
    assert admitted(admission, "cxyz") == "cxy"


@given(
    st.lists(st.lists(st.integers(0, 12), max_size=6), max_size=40),
    st.integers(1, 8),
    st.integers(2, 3),
)
def test_c15_the_tracker_agrees_with_a_plain_one(offers, max_keys, threshold):
    admission = Admission(threshold, [], max_keys)
    order: list[int] = []  # the longest unoffered first
    counts: dict[int, int] = {}
    for numbers in offers:
        admission.offer(make_keys("".join(chr(97 + number) for number in numbers)), set())
        unique = list(dict.fromkeys(numbers))
        for number in [number for number in unique if number in order]:
            counts[number] += 1
            order.remove(number)
            order.append(number)
        for number in [number for number in unique if number not in order]:
            if len(order) >= max_keys:
                others = [other for other in order if other not in unique]
                if not others:
                    continue
                order.remove(others[0])
                del counts[others[0]]
            order.append(number)
            counts[number] = 1
        for number in range(13):
            key = make_keys(chr(97 + number))[0]
            assert admission.is_admitted(key, threshold) == (counts.get(number, 0) >= threshold)
            assert admission.is_below(key) == (0 < counts.get(number, 0) < threshold)


# -- the pool


def picky_world(*tiers: TierScript | str, num_rows: int = 8) -> World:
    """A pool that takes a block at its second offer."""
    world = World(num_rows, tiers, limits=generous_limits(num_rows, store_threshold=2))
    world.new_request("r", "s", "t")
    return world


def test_c15_the_pool_stores_a_block_at_its_second_offer():
    world = picky_world()
    assert world.prepare_store("r", make_keys("ab")).keys == ()
    assert world.prepare_store("r", make_keys("ab")).keys == (), "the same request counts once"
    assert world.prepare_store("s", make_keys("bc")).keys == make_keys("b")
    assert world.coordinator.counters.below_threshold == 5


def test_c15_c60_a_block_below_the_threshold_says_so():
    world = picky_world()
    world.prepare_store("r", make_keys("a"))
    assert world.lookup("s", make_keys("a")).reason is MissReason.BELOW_THRESHOLD
    assert world.lookup("s", make_keys("b")).reason is MissReason.NOT_STORED
    stored = world.prepare_store("t", make_keys("a"))
    world.complete_store(stored.job_id, success=False)
    assert world.lookup("s", make_keys("a")).reason is MissReason.NOT_STORED


def test_c15_a_store_that_found_no_room_is_one_offer():
    world = picky_world(num_rows=1)
    world.prepare_store("r", make_keys("a"))
    held = world.prepare_store("s", make_keys("a"))
    assert held.keys == make_keys("a")
    assert world.prepare_store("r", make_keys("b")).keys == ()
    assert world.prepare_store("s", make_keys("b")) is None
    assert world.prepare_store("s", make_keys("b")) is None
    world.complete_store(held.job_id)
    assert world.prepare_store("s", make_keys("b")).keys == make_keys("b")


def test_c15_blocks_that_a_tier_must_have_bypass_the_threshold():
    world = picky_world()
    coordinator = world.coordinator
    request = coordinator.state.requests["r"]
    prepared = coordinator._cascades.prepare(request, make_keys("ab"), world.now, admit_all=True)
    assert prepared.keys == make_keys("ab")


# -- tiers


def stores(world: World, tier: str) -> list[list]:
    """The keys of each store job that a tier has not answered."""
    return [list(world.running[job].job.keys) for job in world.jobs(JobHook.STORE, tier)]


def test_c15_a_tier_has_a_threshold_of_its_own():
    world = World(8, ["x", TierScript(name="y", store_threshold=2)])
    world.new_request("r", "s")
    world.put("r", make_keys("a"), cascade=False)
    assert (stores(world, "x"), stores(world, "y")) == ([make_keys("a")], [])
    assert world.coordinator.counters.tiers["y"].below_threshold == 1
    world.reset(tiers=False)
    world.put("s", make_keys("ab"), cascade=False)
    assert stores(world, "y") == [make_keys("a")]
    world.settle()
    world.check_at_rest()


def test_c15_a_tier_gets_what_the_pool_holds_once_it_was_offered_often_enough():
    world = World(8, ["x", TierScript(name="y", store_threshold=2)])
    world.new_request("r", "s", "t")
    world.put("r", make_keys("ab"))
    assert world.prepare_store("s", make_keys("a")).keys == ()
    assert (stores(world, "x"), stores(world, "y")) == ([], [make_keys("a")])
    world.prepare_store("s", make_keys("a"))
    assert stores(world, "y") == [make_keys("a")], "each (tier, request, key) once (C20)"
    world.answer_all(JobHook.STORE)
    world.prepare_store("t", make_keys("a"))
    assert stores(world, "y") == [], "it is there"
    world.settle()
    world.check_at_rest()


def test_c15_a_tier_may_decline_blocks_without_a_fault():
    world = World(8, [TierScript.limited("x", breaker_failures=1)])
    world.new_request("r", "s")
    world.put("r", make_keys("abc"), cascade=False)
    world.answer(world.jobs(JobHook.STORE)[0], Answer.MISSING, make_keys("b"))
    counters = world.coordinator.counters.tiers["x"]
    assert (counters.stored, counters.declined, counters.store_failed) == (2, 1, 0)
    world.reset(tiers=False)
    assert list(world.fetch("s", make_keys("ab")).states) == [LookupState.HIT, LookupState.MISS]
    world.put("s", make_keys("d"), cascade=False)
    assert stores(world, "x") == [make_keys("d")], "the breaker is closed"


@pytest.mark.parametrize("answer", [Answer.FAILED, Answer.ERROR])
def test_c30_a_store_that_failed_is_none_that_was_declined(answer):
    world = World(8, ["x"])
    world.new_request("r")
    world.put("r", make_keys("ab"), cascade=False)
    world.answer_all(JobHook.STORE, answer=answer)
    counters = world.coordinator.counters.tiers["x"]
    assert (counters.declined, counters.store_failed) == (0, 2)
