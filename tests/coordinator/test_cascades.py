"""Cascades (C20, C26, C28): what a stored block goes on to, in which order tiers hear of it, when it is dropped."""

import pytest

from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.values import JobResult, LookupState, MissReason
from tests.sim.scripted import Answer, JobHook, TierScript
from tests.sim.world import World, generous_limits, make_keys

HIT, PENDING, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.MISS


def store(world: World, request: str, keys: str) -> None:
    """A device store that succeeds; its cascades wait for an answer."""
    world.put(request, make_keys(keys), cascade=False)


def hooks(world: World, tier: str, request: str) -> list[str]:
    """The hooks that a tier saw called for a request."""
    return [call.hook for call in world.hooks.calls if (call.tier, call.request) == (tier, request)]


def dropped(world: World, tier: str) -> int:
    """Blocks left out of cascades to a tier."""
    return world.coordinator.counters.tiers[tier].dropped


# -- one job per tier


def test_c20_a_device_store_goes_to_every_tier_as_one_job():
    world = World(4, ["x", "y"])
    world.new_request("r")
    store(world, "r", "abc")
    assert [world.running[j].tier for j in world.jobs(JobHook.STORE)] == ["x", "y"]
    assert all(list(world.running[j].job.keys) == make_keys("abc") for j in world.jobs(JobHook.STORE))


@pytest.mark.parametrize("answer", [Answer.OK, Answer.FAILED, Answer.ERROR, None])
def test_c20_k5_o1_a_store_job_unpins_its_rows_once_however_it_ends(answer):
    world = World(2, ["x", "y"])
    world.new_request("r")
    store(world, "r", "ab")
    assert world.prepare_store("r", make_keys("c")) is None
    world.answer_all(JobHook.STORE, "y")
    assert world.prepare_store("r", make_keys("c")) is None, "x pins them still"
    if answer is None:
        world.advance(60.0)
    else:
        world.answer_all(JobHook.STORE, "x", answer)
    assert world.prepare_store("r", make_keys("cd")) is not None
    world.settle()
    world.check_at_rest()


def test_c20_a_block_is_sealed_once_for_all_tiers():
    world = World(4, ["x", "y"])
    world.new_request("r")
    store(world, "r", "a")
    block = world.ledger.find(make_keys("a")[0])
    assert world.rows[block.row].proof is not None
    world.answer_all(JobHook.STORE)
    world.settle()
    world.check_at_rest()


def test_c03_a_row_waits_for_its_sealing_however_late_and_is_not_another_blocks_meanwhile():
    world = World(1, ["x"])
    world.hold_sealing = True
    world.new_request("r")
    store(world, "r", "a")
    world.advance(1000.0)  # the store's deadline is long past
    assert world.prepare_store("r", make_keys("b")) is None
    world.finish_sealing()
    assert world.prepare_store("r", make_keys("b")) is not None


def test_c20_what_a_tier_already_holds_is_not_given_to_it_again():
    world = World(4, [TierScript(name="a", resident=True)])
    world.new_request("w", "r")
    world.put("w", make_keys("a"))
    world.reset(tiers=False)
    store(world, "r", "ab")
    assert [list(world.running[j].job.keys) for j in world.jobs(JobHook.STORE)] == [make_keys("b")]


def test_c20_a_request_that_found_its_prefix_nowhere_gives_all_it_computes_without_looking_for_it():
    world = World(4, [TierScript(name="a", resident=True)])
    world.new_request("w", "r")
    world.put("w", make_keys("b"))
    world.reset(tiers=False)
    assert world.lookup("r", make_keys("ab")).reason is MissReason.NOT_STORED
    store(world, "r", "ab")
    assert [list(world.running[j].job.keys) for j in world.jobs(JobHook.STORE)] == [make_keys("ab")]


def test_c20_the_usual_cascade_holds_each_block_for_its_sealing_and_for_every_tier():
    world = World(4, ["x", "y"])
    world.hold_sealing = True
    world.new_request("r")
    store(world, "r", "ab")
    blocks = world.ledger.find_all(make_keys("ab"))
    assert [(block.pins, block.cascades) for block in blocks] == [(3, 2), (3, 2)]
    world.finish_sealing()
    world.answer_all(JobHook.STORE, "x")
    assert [(block.pins, block.cascades) for block in blocks] == [(1, 1), (1, 1)]
    world.answer_all(JobHook.STORE, "y")
    world.settle()
    world.check_at_rest()


def test_c27_a_request_is_stored_only_in_the_tiers_it_may():
    world = World(4, ["x", "y"])
    world.new_request("r", store_tiers=["y"])
    store(world, "r", "a")
    assert [world.running[j].tier for j in world.jobs(JobHook.STORE)] == ["y"]


# -- order


def test_k4_o3_c26_finished_comes_after_the_last_store_and_once():
    world = World(4, ["a"])
    world.new_request("r")
    prepared = world.prepare_store("r", make_keys("ab"))
    world.finish("r")
    assert hooks(world, "a", "r") == ["on_new_request"]
    world.complete_store(prepared.job_id)
    assert hooks(world, "a", "r") == ["on_new_request", "submit_store", "on_request_finished"]
    world.answer_all(JobHook.STORE)
    assert hooks(world, "a", "r").count("on_request_finished") == 1


def test_c26_finished_waits_for_the_last_of_several_device_stores():
    world = World(4, ["a"])
    world.new_request("r")
    first = world.prepare_store("r", make_keys("a"))
    second = world.prepare_store("r", make_keys("b"))
    world.finish("r")
    world.complete_store(second.job_id, success=False)
    assert "on_request_finished" not in hooks(world, "a", "r")
    world.complete_store(first.job_id)
    assert hooks(world, "a", "r")[-1] == "on_request_finished"


def test_c26_a_promotion_that_has_not_left_never_follows_the_finish():
    world = World(4, [TierScript(name="a", resident=True)])
    world.new_request("w", "r")
    world.put("w", make_keys("a"))
    world.reset(tiers=False)
    world.lookup("r", make_keys("a"))
    world.finish("r")
    world.end_step()
    assert hooks(world, "a", "r") == ["on_new_request", "on_request_finished"]


def test_the_step_end_is_told_to_tiers_that_were_given_jobs_and_to_no_other():
    world = World(4, ["x", "y"])
    world.new_request("r", store_tiers=["x"])
    world.end_step()
    store(world, "r", "a")
    world.end_step()
    world.end_step()
    assert [call.tier for call in world.hooks.calls if call.hook == "on_schedule_end"] == ["x"]
    world.lookup("r", make_keys("z"))
    world.end_step()
    assert [call.tier for call in world.hooks.calls if call.hook == "on_schedule_end"] == ["x", "x", "y"]


def test_k4_o2_a_preempted_request_comes_back_while_its_store_is_pending():
    world = World(4, ["a"])
    world.new_request("r")
    prepared = world.prepare_store("r", make_keys("ab"))
    assert list(world.lookup("r", make_keys("abc")).states)[:2] == [PENDING, PENDING]
    world.complete_store(prepared.job_id)
    assert list(world.fetch("r", make_keys("abc")).states) == [HIT, HIT, MISS]
    rest = world.prepare_store("r", make_keys("abc"))
    assert rest.keys == make_keys("c")
    world.complete_store(rest.job_id)
    assert [call.keys for call in world.hooks.calls if call.hook == "submit_store"] == [
        tuple(make_keys("ab")),
        tuple(make_keys("c")),
    ]


# -- failed stores


@pytest.mark.parametrize("answer", [Answer.ERROR, Answer.FAILED, Answer.LIE])
def test_k2_o1_a_key_whose_store_failed_misses_and_can_be_stored_again(answer):
    world = World(4, ["a"])
    world.new_request("w", "r")
    store(world, "w", "a")
    world.answer_all(JobHook.STORE, answer=answer)
    world.reset(tiers=False)
    world.advance(60.0)
    assert world.fetch("r", make_keys("a")).hits == 0
    world.put("r", make_keys("a"))
    world.reset(tiers=False)
    assert world.fetch("r", make_keys("a")).hits == 1


def test_k2_o1_of_a_store_that_failed_half_way_the_whole_blocks_are_kept():
    world = World(4, ["a"])
    world.new_request("w", "r")
    store(world, "w", "ab")
    world.answer(world.jobs(JobHook.STORE)[0], Answer.FAILED, make_keys("b"))
    counters = world.coordinator.counters.tiers["a"]
    assert (counters.stored, counters.store_failed) == (1, 1)
    world.reset(tiers=False)
    assert list(world.fetch("r", make_keys("ab")).states) == [HIT, MISS]


def test_k2_o2_a_block_whose_store_is_under_way_is_not_loadable():
    world = World(2, ["a"])
    world.new_request("w", "r")
    store(world, "w", "a")
    world.reset(tiers=False)
    assert world.fetch("r", make_keys("a")).hits == 0


# -- back-pressure


def test_c28_rows_pinned_for_one_tier_are_limited():
    world = World(8, [TierScript.limited("x", max_cascade=0.25), "y"])
    world.new_request("r")
    store(world, "r", "abc")
    assert [len(world.running[j].job.keys) for j in world.jobs(JobHook.STORE)] == [2, 3]
    assert (dropped(world, "x"), dropped(world, "y")) == (1, 0)
    world.answer_all(JobHook.STORE, "x")
    store(world, "r", "d")
    assert dropped(world, "x") == 1


def test_c28_rows_pinned_for_all_tiers_are_limited_and_a_row_counts_once():
    world = World(8, ["x", "y"], limits=generous_limits(8, max_cascade_rows=3))
    world.new_request("r")
    store(world, "r", "abcd")
    assert [len(world.running[j].job.keys) for j in world.jobs(JobHook.STORE)] == [3, 3]
    assert world.coordinator.state.cascade_rows == 3
    world.answer_all(JobHook.STORE, "x")
    assert world.coordinator.state.cascade_rows == 3
    world.answer_all(JobHook.STORE, "y")
    assert world.coordinator.state.cascade_rows == 0


def test_c28_a_tier_that_is_behind_does_not_hold_up_another():
    world = World(8, [TierScript.limited("slow", max_cascade=0.125), "fast"])
    world.new_request("r")
    for key in "abcd":
        store(world, "r", key)
        world.answer_all(JobHook.STORE, "fast")
    assert world.coordinator.counters.tiers["fast"].stored == 4
    assert dropped(world, "slow") == 3


def test_c28_a_late_read_of_a_changed_row_is_exposed_by_its_proof():
    world = World(1, ["a"])
    world.new_request("w", "r")
    store(world, "w", "a")
    late = world.jobs(JobHook.STORE)[0]
    world.advance(60.0)
    assert world.running[late].is_cancelled
    store(world, "w", "b")
    world.advance(120.0)
    world.answer(late)  # the tier has read b's bytes under a's key
    world.reset(tiers=False)
    found = world.fetch("r", make_keys("a"))
    assert found.hits == 0
    assert world.coordinator.counters.tiers["a"].integrity == 1


# -- what the tier held already


def test_b12_what_a_tier_held_already_is_not_counted_as_stored():
    world = World(4, ["a"])
    world.new_request("r")
    store(world, "r", "ab")
    (job,) = world.jobs(JobHook.STORE)
    world.running.pop(job)
    world.report(JobResult(job_id=job, held=make_keys("a")))
    counters = world.coordinator.counters.tiers["a"]
    assert (counters.stored, counters.store_failed, counters.faults) == (1, 0, 0)


@pytest.mark.parametrize("hook", [JobHook.STORE, JobHook.LOAD])
def test_a_breaker_stays_open_while_nothing_moves(hook):
    """That a block is held already, or is not there, a tier may say while its server is stopped."""
    world = World(8, [TierScript.limited("a", breaker_failures=1, breaker_pause_s=1.0, miss_ttl=0.0)])
    world.new_request("r", "s", "t")
    if hook is JobHook.LOAD:
        world.put("r", make_keys("ab"))
        world.reset(tiers=False)
    breaker = (
        world.coordinator.state.tiers["a"]
        .service(JobKind.TIER_STORE if hook is JobHook.STORE else JobKind.TIER_LOAD)
        .breaker
    )

    def job_of(request: str, keys: str) -> int:
        if hook is JobHook.STORE:
            store(world, request, keys)
        else:
            world.lookup(request, make_keys(keys))
            world.answer_all(JobHook.LOOKUP)
            world.lookup(request, make_keys(keys))
            world.end_step()
        (job,) = world.jobs(hook)
        return job

    world.answer(job_of("r", "a"), Answer.ERROR)
    world.advance(2.0)
    job = job_of("s", "b")
    world.running.pop(job)
    held, missing = (make_keys("b"), []) if hook is JobHook.STORE else ([], make_keys("b"))
    world.report(JobResult(job_id=job, held=held, missing=missing))
    assert breaker.state.value == "open"
    world.advance(60.0)
    world.answer(job_of("t", "a" if hook is JobHook.LOAD else "c"))
    assert breaker.state.value == "closed"
