"""A tier's fault costs hits and nothing else (C30, C31): nonsense, silence, quarantine and the circuit breaker."""

import pytest

from kvtier_core.coordinator.breaker import Breaker, BreakerState
from kvtier_core.coordinator.jobs import JobTable
from kvtier_core.values import LookupState, MissReason
from tests.sim.scripted import Answer, JobHook, TierScript
from tests.sim.world import World, generous_limits, make_keys

HIT, PENDING, RETRY, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.RETRY, LookupState.MISS


def world_behind(keys: str, num_rows: int, *tiers: TierScript | str) -> World:
    """An empty pool in front of *tiers*, which hold *keys*; requests "w" and "r" have begun."""
    world = World(num_rows, tiers or ["a"])
    world.new_request("w", "r")
    for key in make_keys(keys):
        world.put("w", [key])
    world.reset(tiers=False)
    world.begin("w")
    world.advance(60.0)
    return world


def start_load(world: World, request: str, keys: str) -> int:
    """Look up until a load of *keys* is under way; its job id."""
    world.lookup(request, make_keys(keys))
    world.answer_all(JobHook.LOOKUP)
    assert list(world.lookup(request, make_keys(keys)).states) == [PENDING] * len(keys)
    world.end_step()
    return world.jobs(JobHook.LOAD)[-1]


def faults(world: World, tier: str = "a") -> int:
    """Faults counted against a tier."""
    return world.coordinator.counters.tiers[tier].faults


# -- what a tier answers


@pytest.mark.parametrize("answer", [Answer.ERROR, Answer.FAILED])
def test_c30_a_lookup_that_fails_is_a_miss(answer):
    world = world_behind("ab", 4)
    world.lookup("r", make_keys("ab"))
    world.answer_all(JobHook.LOOKUP, answer=answer)
    found = world.lookup("r", make_keys("ab"))
    assert (list(found.states), found.reason) == ([MISS], MissReason.TIER_FAILED)


def test_c30_what_a_tier_is_given_it_cannot_change():
    world = world_behind("ab", 4)
    start_load(world, "r", "ab")
    world.put("w", make_keys("x"), cascade=False)
    for running in world.running.values():
        assert isinstance(running.job.keys, tuple)
        assert isinstance(running.job.rows, tuple)


def test_c30_a_fault_of_one_tier_leaves_the_other_alone():
    world = world_behind("a", 4, "x", "y")
    for _ in range(10):
        world.fault("x")
    assert world.fetch("r", make_keys("a")).hits == 1
    world.put("r", make_keys("z"))
    assert world.coordinator.counters.tiers["y"].stored == 2


# -- silence


def test_c31_a_tier_that_hangs_on_stores_while_another_still_hits():
    world = world_behind("a", 2, "hangs", "works")
    world.put("w", make_keys("x"), cascade=False)
    world.answer_all(JobHook.STORE, "works")
    world.new_request("s")
    assert world.prepare_store("s", make_keys("yz")) is None, "x is pinned by the hanging tier"
    world.advance(60.0)
    world.put("s", make_keys("y"), cascade=False)
    world.answer_all(JobHook.STORE, "works")
    world.lookup("r", make_keys("a"))
    world.answer_all(JobHook.LOOKUP, "works")
    world.advance(2.0)
    assert list(world.lookup("r", make_keys("a")).states) == [PENDING]
    world.end_step()
    world.answer_all(JobHook.LOAD, "works")
    assert world.lookup("r", make_keys("a")).hits == 1
    assert world.coordinator.counters.tiers["hangs"].timeouts == 2


def test_c31_quarantined_rows_come_back_with_the_tiers_answer_and_not_with_time():
    world = world_behind("a", 1)
    load = start_load(world, "r", "a")
    for _ in range(5):
        world.advance(1000.0)
        assert world.prepare_store("w", make_keys("x")) is None
    assert world.coordinator.state.tiers["a"].quarantined_rows == 1
    world.answer(load)
    assert world.prepare_store("w", make_keys("x")) is not None
    assert world.coordinator.state.tiers["a"].quarantined_rows == 0


def test_c31_a_tier_with_too_many_quarantined_rows_gets_no_more_promotions():
    limited = TierScript.limited("a", max_quarantined=0.1, breaker_failures=100)
    world = world_behind("abc", 20, limited)
    loads = [start_load(world, "r", key) for key in "ab"]
    world.advance(30.0)
    world.lookup("r", make_keys("c"))
    world.answer_all(JobHook.LOOKUP)
    found = world.lookup("r", make_keys("c"))
    assert (list(found.states), found.reason) == ([MISS], MissReason.TIER_FAILED)
    world.answer(loads[0])
    assert list(world.lookup("r", make_keys("c")).states) == [PENDING]


def test_c31_quarantine_of_the_first_tier_leaves_its_keys_to_the_second():
    world = world_behind("ab", 10, TierScript.limited("x", max_quarantined=0.1, breaker_failures=100), "y")
    start_load(world, "r", "a")
    world.advance(30.0)
    world.lookup("r", make_keys("b"))
    world.answer_all(JobHook.LOOKUP)
    assert list(world.lookup("r", make_keys("b")).states) == [PENDING]
    world.end_step()
    assert len(world.jobs(JobHook.LOAD, "y")) == 1


def test_c31_a_tier_that_answers_no_lookup_is_asked_no_more_than_its_limit():
    world = World(4, [TierScript.limited("a", breaker_failures=100, max_unanswered=3)])
    world.new_request("r")
    for key in "abcdef":
        world.lookup("r", make_keys(key))
        world.advance(2.0)
    assert len(world.jobs(JobHook.LOOKUP)) == 3
    assert world.lookup("r", make_keys("f")).reason is MissReason.TIER_FAILED
    world.answer(world.jobs(JobHook.LOOKUP)[0])
    world.advance(60.0)
    assert list(world.lookup("r", make_keys("f")).states) == [RETRY]


def test_c31_a_tier_that_answers_no_store_gets_no_more_than_its_limit_and_serves_what_it_holds():
    world = world_behind("z", 8, TierScript.limited("a", breaker_failures=100, max_unanswered=3))
    for key in "abcdef":
        world.put("w", make_keys(key), cascade=False)
        world.advance(60.0)
    assert len(world.jobs(JobHook.STORE)) == 3
    assert world.coordinator.counters.tiers["a"].dropped == 3
    assert world.fetch("r", make_keys("z")).hits == 1
    world.answer(world.jobs(JobHook.STORE)[0])
    world.put("w", make_keys("g"))
    assert world.coordinator.counters.tiers["a"].stored == 2
    world.settle()
    world.check_at_rest()


@pytest.mark.parametrize(("limit", "left"), [(500, 500), (5000, 1000)])
def test_c31_k3_o4_what_a_tier_leaves_unanswered_costs_the_engine_no_time(monkeypatch, limit, left):
    world = World(4, [TierScript.limited("a", breaker_failures=10**6, max_unanswered=limit)], check_every=100)
    world.new_request("w")
    for number in range(1000):
        world.put("w", make_keys(chr(1000 + number)), cascade=False)
        world.advance(60.0)
    coordinator = world.coordinator
    assert len(coordinator.state.jobs) == left
    monkeypatch.setattr(JobTable, "values", None)  # nobody may walk them
    assert not coordinator.has_pending_work
    assert coordinator.store_room(world.now) == 4
    assert coordinator.prepare_store("w", make_keys("xy"), world.now) is not None
    assert coordinator.has_pending_work
    assert coordinator.store_room(world.now) == (4 if left == limit else 2), "no tier, no limit"


# -- the breaker in the path


def state(world: World, kind: JobHook = JobHook.LOAD) -> BreakerState:
    """The state of the breaker of tier "a" for lookups or loads."""
    tier = world.coordinator.state.tiers["a"]
    return (tier.lookups if kind is JobHook.LOOKUP else tier.loads).breaker.state


def fail_loads(world: World, keys: str) -> None:
    """Each of *keys* is loaded once and fails."""
    for key in keys:
        world.answer(start_load(world, "r", key), Answer.FAILED)


def test_c31_repeated_failures_take_a_tier_out_and_a_probe_brings_it_back():
    world = world_behind("abcd", 4, TierScript.limited("a", breaker_failures=3, breaker_pause_s=1.0))
    fail_loads(world, "ab")
    assert state(world) is BreakerState.CLOSED
    fail_loads(world, "c")
    assert state(world) is BreakerState.OPEN
    found = world.lookup("r", make_keys("d"))
    assert (list(found.states), found.reason) == ([MISS], MissReason.TIER_FAILED)
    assert world.jobs(JobHook.LOOKUP) == []
    world.advance(1.0)
    load = start_load(world, "r", "d")
    assert state(world) is BreakerState.PROBING
    world.answer(load)
    assert state(world) is BreakerState.CLOSED
    assert world.lookup("r", make_keys("d")).hits == 1


def test_c31_while_a_probe_is_out_nothing_else_goes():
    world = world_behind("abcde", 4, TierScript.limited("a", breaker_failures=1, breaker_pause_s=1.0))
    fail_loads(world, "a")
    world.advance(1.0)
    start_load(world, "r", "b")
    assert world.lookup("w", make_keys("c")).reason is MissReason.TIER_FAILED


def test_c31_a_lookup_that_is_a_probe_is_waited_for_by_nobody_and_brings_the_tier_back():
    world = world_behind("abc", 4, TierScript.limited("a", breaker_failures=1, breaker_pause_s=1.0))
    world.new_request("first", "second", "third")
    assert list(world.lookup("r", make_keys("a")).states) == [RETRY]
    world.advance(2.0)
    assert state(world, JobHook.LOOKUP) is BreakerState.OPEN
    world.advance(1.0)
    for request in ("first", "second"):
        found = world.lookup(request, make_keys("b"))
        assert (list(found.states), found.reason) == ([MISS], MissReason.TIER_FAILED)
        assert state(world, JobHook.LOOKUP) is BreakerState.PROBING
        assert len(world.jobs(JobHook.LOOKUP)) == 2, "the silent one and the probe"
    world.answer(world.jobs(JobHook.LOOKUP)[-1])
    assert state(world, JobHook.LOOKUP) is BreakerState.CLOSED
    assert world.fetch("third", make_keys("b")).hits == 1


def test_c31_a_tier_that_answers_lookups_and_stalls_on_loads_is_taken_out():
    world = world_behind("abcd", 8, TierScript.limited("a", breaker_failures=3))
    for key in "abc":
        start_load(world, "r", key)
        world.advance(30.0)
    assert state(world) is BreakerState.OPEN
    assert world.lookup("r", make_keys("d")).reason is MissReason.TIER_FAILED


def test_c31_a_tier_that_never_answers_lookups_is_taken_out():
    world = World(4, [TierScript.limited("a", breaker_failures=3)])
    world.new_request("a", "b", "c", "d")
    for name in "abc":
        assert list(world.lookup(name, make_keys(name)).states) == [RETRY]
        world.advance(2.0)
    assert world.lookup("d", make_keys("d")).reason is MissReason.TIER_FAILED
    assert len(world.jobs(JobHook.LOOKUP)) == 3


def test_c31_store_failures_do_not_stop_loads():
    world = world_behind("a", 8, TierScript.limited("a", breaker_failures=1))
    world.put("w", make_keys("x"), cascade=False)
    world.answer_all(JobHook.STORE, answer=Answer.ERROR)
    world.put("w", make_keys("y"), cascade=False)
    assert world.jobs(JobHook.STORE) == []
    assert world.coordinator.counters.tiers["a"].dropped == 1
    assert world.fetch("r", make_keys("a")).hits == 1


def test_c31_load_failures_do_not_stop_stores():
    world = world_behind("a", 8, TierScript.limited("a", breaker_failures=1))
    fail_loads(world, "a")
    world.put("w", make_keys("x"))
    assert world.coordinator.counters.tiers["a"].stored == 2


@pytest.mark.parametrize("kind", [JobHook.LOOKUP, JobHook.LOAD])
def test_c31_a_reset_while_a_probe_is_out_does_not_shut_the_tier_out_for_ever(kind):
    world = world_behind("ab", 8, TierScript.limited("a", breaker_failures=1, breaker_pause_s=1.0))
    world.lookup("r", make_keys("a"))
    if kind is JobHook.LOAD:
        world.answer_all(JobHook.LOOKUP)
        world.lookup("r", make_keys("a"))
        world.end_step()
    world.advance(30.0)
    world.advance(1.0)
    world.lookup("r", make_keys("b"))
    if kind is JobHook.LOAD:
        world.answer(world.jobs(JobHook.LOOKUP)[-1])
        world.lookup("r", make_keys("b"))
        world.end_step()
    world.reset()
    world.advance(1.0)
    world.put("w", make_keys("c"))
    world.reset(tiers=False)
    world.advance(60.0)
    if kind is JobHook.LOOKUP:  # of which the first is the next probe
        assert world.fetch("r", make_keys("c")).reason is MissReason.TIER_FAILED
        world.answer_all(JobHook.LOOKUP)
    assert world.fetch("r", make_keys("c")).hits == 1


def test_c31_failing_jobs_that_nobody_waits_for_do_not_count_against_the_tier_again():
    world = world_behind("a", 4, TierScript.limited("a", breaker_failures=2))
    load = start_load(world, "r", "a")
    world.advance(30.0)
    world.answer(load, Answer.ERROR)
    assert state(world) is BreakerState.CLOSED


# -- the breaker by itself


def test_c31_the_pauses_of_a_breaker_grow_to_their_limit_and_start_anew_after_a_success():
    breaker = Breaker(failures=1, pause_s=1.0, max_pause_s=3.0)
    now = 0.0
    breaker.failed(now)
    for pause in (1.0, 2.0, 3.0, 3.0):
        assert not breaker.allows(now + pause - 0.01)
        now += pause
        assert breaker.allows(now)
        breaker.submitted()
        assert not breaker.allows(now + 1000.0), "one probe at a time"
        breaker.failed(now)
    breaker.succeeded()
    assert breaker.allows(now)
    breaker.failed(now)
    assert breaker.allows(now + 1.0)


def test_c31_a_success_ends_a_row_of_failures():
    breaker = Breaker(failures=2, pause_s=1.0, max_pause_s=1.0)
    for _ in range(5):
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.allows(0.0)


def test_c31_failures_while_open_do_not_prolong_the_pause():
    breaker = Breaker(failures=1, pause_s=1.0, max_pause_s=8.0)
    breaker.failed(0.0)
    breaker.failed(0.9)
    assert breaker.allows(1.0)


def test_k3_o3_deadlines_of_finished_jobs_are_not_kept():
    world = World(2, limits=generous_limits(2))
    world.new_request("w", "r")
    world.put("w", make_keys("a"))
    pending = world.prepare_store("w", make_keys("b"))
    for _ in range(100):
        world.complete_load(world.prepare_load("r", make_keys("a")).job_id)
    assert len(world.coordinator.state.jobs._deadlines) <= 2
    world.complete_store(pending.job_id)
