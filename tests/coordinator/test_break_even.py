"""Break-even (C35): loading is never a loss, by what loads were measured to take and computing is said to cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_core.coordinator.tier_record import LoadTimes
from kvtier_core.values import LookupState, MissReason
from tests.sim.scripted import Answer, JobHook, TierScript
from tests.sim.world import World, generous_limits, make_keys

HIT, PENDING, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.MISS


# -- what loads take


def times(*loads: tuple[int, float]) -> LoadTimes:
    """What is known after these loads of (blocks, seconds)."""
    known = LoadTimes()
    for blocks, seconds in loads:
        known.add(blocks, seconds)
    return known


def test_c35_too_few_loads_predict_nothing():
    assert times().predict(1) is None
    assert times((1, 1.0), (2, 1.0)).predict(1) is None
    assert times((1, 1.0), (2, 1.0)).describe() is None


@given(st.floats(0, 5), st.floats(0.001, 2), st.lists(st.integers(1, 500), min_size=3, max_size=20))
def test_c35_a_tier_of_fixed_and_proportional_times_is_predicted(fixed, per_block, sizes):
    known = times(*[(size, fixed + size * per_block) for size in sizes])
    if len(set(sizes[-8:])) > 1:
        assert known.predict(1000) == pytest.approx(fixed + 1000 * per_block, rel=1e-3)


def test_c35_loads_of_one_size_count_as_proportional():
    assert times((4, 2.0), (4, 2.0), (4, 2.0)).predict(8) == pytest.approx(4.0)


@given(st.integers(0, 7), st.floats(0, 1000))
def test_c35_one_outlier_moves_nothing(position, seconds):
    loads = [(size, 1.0 + 0.1 * size) for size in (1, 20, 3, 17, 5, 13, 7, 11)]
    loads[position] = (loads[position][0], seconds)
    assert times(*loads).predict(10) == pytest.approx(2.0, rel=0.05)


def test_c35_a_tier_that_changes_is_known_anew_after_a_few_loads():
    known = times(*[(size, 10.0 + size) for size in range(1, 50)])
    for size in (3, 9, 5, 14, 7, 2, 11, 4):
        known.add(size, 0.01 * size)
    assert known.predict(10) == pytest.approx(0.1)
    described = known.describe()
    assert described is not None
    assert described["fixed"] == pytest.approx(0.0, abs=1e-9)
    assert described["per_block"] == pytest.approx(0.01)


def test_c35_faster_large_loads_than_small_ones_predict_no_negative_time():
    known = times((1, 9.0), (10, 3.0), (100, 1.0))
    assert known.predict(10**6) == pytest.approx(3.0)


# -- what is done about it


def world_behind(keys: str, *tiers: TierScript | str, num_rows: int = 64, **limits: float) -> World:
    """An empty pool in front of *tiers*, which hold *keys*; blocks of four tokens; a request "r" has begun."""
    world = World(
        num_rows,
        tiers or [TierScript(name="a", resident=True)],
        groups=[GroupShape(4)],
        limits=generous_limits(num_rows, break_even_margin=1.0, break_even_probe_s=100.0, **limits),
    )
    world.new_request("w", "r")
    world.put("w", make_keys(keys))
    return world


def measure(world: World, seconds: float, tier: str | None = None) -> None:
    """Let three loads of one, two and three blocks take *seconds* each."""
    for letters in ("a", "ab", "abc"):
        world.reset(tiers=False)
        load(world, "w", letters, seconds, tier)


def load(world: World, request: str, letters: str, seconds: float, tier: str | None = None) -> None:
    """Look up, and answer the load that comes of it after *seconds*."""
    world.lookup(request, make_keys(letters))
    world.end_step()
    world.advance(seconds)
    world.answer_all(JobHook.LOAD, tier)
    world.answer_all(JobHook.LOAD)


def ask(world: World, request: str, keys: str) -> tuple[list[LookupState], MissReason | None]:
    """One lookup's answer."""
    found = world.lookup(request, make_keys(keys))
    return list(found.states), found.reason


def test_c35_a_run_that_takes_longer_than_computing_it_is_passed_over_before_a_row_is_taken():
    world = world_behind("abcdef")
    measure(world, 1.0)
    world.coordinator.set_recompute_cost(0.05)  # 0.2 s a block
    world.reset(tiers=False)
    free = world.ledger.num_free
    assert ask(world, "r", "abcd") == ([MISS], MissReason.BREAK_EVEN)
    assert world.ledger.num_free == free
    assert ask(world, "r", "abcdef") == ([PENDING] * 6, None), "six blocks take 1.2 s to compute"


def test_c35_without_what_computing_costs_everything_is_loaded():
    world = world_behind("abcd")
    measure(world, 20.0)
    world.reset(tiers=False)
    assert ask(world, "r", "a") == ([PENDING], None)
    world.coordinator.set_recompute_cost(0.0)
    world.reset(tiers=False)
    assert ask(world, "r", "a") == ([MISS], MissReason.BREAK_EVEN)
    world.coordinator.set_recompute_cost(None)
    assert ask(world, "r", "a") == ([PENDING], None)


def test_c35_a_tier_that_was_not_measured_is_asked_to_load():
    world = world_behind("abcd")
    world.coordinator.set_recompute_cost(0.0)
    world.reset(tiers=False)
    assert ask(world, "r", "abcd") == ([PENDING] * 4, None)


@pytest.mark.parametrize(("margin", "reason"), [(0.9, MissReason.BREAK_EVEN), (1.1, None)])
def test_c35_the_margin_decides(margin, reason):
    world = world_behind("abcd")
    world.coordinator.state.limits = generous_limits(64, break_even_margin=margin)
    measure(world, 1.0)
    world.coordinator.set_recompute_cost(0.25)
    world.reset(tiers=False)
    assert ask(world, "r", "a")[1] is reason


def test_c35_a_load_also_saves_what_lies_behind_it_in_the_pool():
    world = world_behind("abcdef")
    measure(world, 1.0)
    world.coordinator.set_recompute_cost(0.05)
    world.reset(tiers=False)
    world.put("w", make_keys("bcdef"), cascade=False)
    assert ask(world, "r", "ab") == ([MISS], MissReason.BREAK_EVEN)
    assert ask(world, "r", "abcdef") == ([PENDING, HIT, HIT, HIT, HIT, HIT], None)


def test_c35_a_tier_that_is_passed_over_is_probed_at_intervals_and_comes_back_when_it_is_faster():
    world = world_behind("abcd")
    measure(world, 1.0)
    world.coordinator.set_recompute_cost(0.05)
    world.reset(tiers=False)
    loads = []
    for number in range(24):
        world.new_request(f"p{number}")
        states, _ = ask(world, f"p{number}", "ab" if number % 2 else "a")
        loads.append(states[0] is PENDING)
        world.end_step()
        world.answer_all(JobHook.LOAD)  # in no time at all, from now on
        world.finish(f"p{number}")
        world.reset(tiers=False)
        world.advance(50.0)
    assert loads[:3] == [False, False, True]
    assert loads[3] is False
    assert loads[-2:] == [True, True]
    assert world.coordinator.state.tiers["a"].probe_at is None


def test_c35_a_slower_tier_is_passed_over_for_a_faster_one_behind_it():
    world = world_behind(
        "abcd", TierScript(name="slow", resident=True), TierScript(name="fast", resident=True)
    )
    measure(world, 1.0, "slow")
    world.coordinator.set_recompute_cost(0.05)
    world.reset(tiers=False)
    assert ask(world, "r", "ab") == ([PENDING, PENDING], None)
    world.end_step()
    assert [world.running[job].tier for job in world.jobs(JobHook.LOAD)] == ["fast"]


def test_c35_k6_o3_a_request_does_not_wait_for_ever_for_a_tier_behind_one_that_is_passed_over():
    world = world_behind("abcd", TierScript(name="slow", resident=True), "silent")
    measure(world, 1.0, "slow")
    world.advance(60.0)
    world.coordinator.set_recompute_cost(0.05)
    world.reset(tiers=False)
    settled = []
    for _ in range(5):
        settled.append(world.lookup("r", make_keys("ab")).is_settled)
        world.advance(1.0)
    assert settled == [False, False, True, True, True]


def test_c35_failed_loads_are_not_measured_and_timeouts_are():
    world = world_behind("abc")
    for answer in (Answer.ERROR, Answer.MISSING, Answer.CORRUPT):
        world.advance(60.0)
        world.reset(tiers=False)
        world.lookup("w", make_keys("abc"))
        world.end_step()
        world.answer_all(JobHook.LOAD, answer=answer)
    assert world.coordinator.state.tiers["a"].load_times.describe() is None
    for _ in range(3):
        world.advance(60.0)
        world.reset(tiers=False)
        world.lookup("w", make_keys("abc"))
        world.end_step()
        world.advance(30.0)
    assert world.coordinator.state.tiers["a"].load_times.predict(3) == pytest.approx(30.0)


def test_c60_c35_blocks_passed_over_count_once_per_request_and_key():
    world = world_behind("abcd")
    measure(world, 1.0)
    world.coordinator.set_recompute_cost(0.0)
    world.reset(tiers=False)
    for _ in range(3):
        ask(world, "r", "abcd")
    assert world.coordinator.counters.tiers["a"].passed_over == 4
    assert world.coordinator.counters.misses[MissReason.BREAK_EVEN] == 1


@pytest.mark.parametrize(
    ("seconds_a_token", "waited"),
    [(None, 30.0), (0.5, 8.0), (0.01, 2.0), (100.0, 30.0)],
    ids=["cost unknown", "as computing", "no less than a lookup", "no more than load_timeout"],
)
def test_c35_a_load_that_hangs_is_waited_for_as_long_as_computing_would_take(seconds_a_token, waited):
    world = world_behind("abcd")
    world.coordinator.set_recompute_cost(seconds_a_token)
    world.reset(tiers=False)
    assert ask(world, "r", "abcd") == ([PENDING] * 4, None)  # 16 tokens
    world.end_step()
    world.advance(waited - 0.1)
    assert ask(world, "r", "abcd") == ([PENDING] * 4, None)
    world.advance(0.1)
    assert ask(world, "r", "abcd") == ([MISS], MissReason.TIER_SLOW)
    assert world.coordinator.counters.tiers["a"].timeouts == 1


def test_c35_what_the_pool_has_already_is_not_waited_for():
    world = world_behind("abcd")
    world.coordinator.set_recompute_cost(1.0)
    world.reset(tiers=False)
    world.put("w", make_keys("abc"), cascade=False)
    ask(world, "r", "abcd")
    world.end_step()
    assert world.coordinator.next_deadline() == world.now + 4.0, "four tokens are to be had from the tier"


def test_c35_a_load_that_is_taken_over_is_waited_for_as_long_as_before():
    world = world_behind("abcd")
    world.coordinator.set_recompute_cost(0.5)
    world.reset(tiers=False)
    world.new_request("heir")
    ask(world, "r", "abcd")
    ask(world, "heir", "abcd")
    world.finish("r")
    world.end_step()
    assert world.coordinator.next_deadline() == world.now + 8.0
