"""Lookups over several KV groups (C21, K12-O3): one end point for all, and only what it needs is asked for and held."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_core.keys import OffloadKey
from kvtier_core.values import MissReason
from tests.sim.scripted import Answer, JobHook, TierScript
from tests.sim.world import World, generous_limits, make_keys

FULL = GroupShape(4)
WINDOW = GroupShape(4, window=8)
PROMPT = "abcdef"  # a block a letter, in every group


def keys_of(world: World, prompt: str = PROMPT) -> tuple[tuple[OffloadKey, ...], ...]:
    """The keys of each group of a prompt, a letter a block of four tokens; larger blocks end at every other letter."""
    return tuple(
        tuple(make_keys(prompt[shape.tokens_per_block // 4 - 1 :: shape.tokens_per_block // 4], group))
        for group, shape in enumerate(world.groups)
    )


def world_of(
    *shapes: GroupShape, num_rows: int = 32, tiers: tuple[TierScript | str, ...] = ("a",), **limits: float
) -> World:
    """A world in which requests "w" and "r" have begun."""
    world = World(num_rows, tiers, groups=shapes, limits=generous_limits(num_rows, **limits))
    world.new_request("w", "r")
    return world


def put(world: World, *blocks: str) -> None:
    """Store the blocks of each group, by their letters."""
    for group, letters in enumerate(blocks):
        if letters:
            world.put("w", make_keys(letters, group))


def push_behind(world: World) -> None:
    """Empty the pool, and let lapse what is known of the tiers."""
    world.reset(tiers=False)
    world.advance(60.0)
    world.hooks.calls.clear()


def settle(world: World, request: str = "r", max_tokens: int = 24) -> int:
    """Look up until nothing is pending; the end point."""
    keys = keys_of(world)
    for _ in range(50):
        found = world.find_end_point(request, keys, max_tokens)
        if found.is_settled:
            return found.tokens
        world.answer_all(JobHook.LOOKUP)
        world.end_step()
        world.answer_all(JobHook.LOAD)
    raise AssertionError("not settled")


def leased(world: World) -> set[bytes]:
    """Keys that are promised to somebody."""
    return set(world.ledger.leases)


def loaded(world: World) -> list[bytes]:
    """Keys that tiers were asked to load."""
    return [key for call in world.hooks.calls if call.hook == "submit_load" for key in call.keys]


# -- the end point


def test_c21_every_end_point_that_pool_or_tier_have_is_told():
    world = world_of(FULL, WINDOW)
    put(world, "abcdef", "abef")
    keys = keys_of(world)
    assert world.coordinator.ends("r", keys, world.now) == [4, 8, 24]
    assert world.coordinator.has_all([*keys[0], keys[1][5]])
    assert not world.coordinator.has_all([*keys[0], keys[1][2]])
    push_behind(world)
    assert world.coordinator.ends("r", keys, world.now) == [], "the tier has not said"
    assert settle(world) == 24
    assert world.coordinator.ends("r", keys, world.now) == [4, 8, 24]
    assert not world.coordinator.has_all(keys[0][:1] + keys[1][:1]), "only what the longest needs was fetched"
    assert world.coordinator.ends("r", keys, world.now, at_once=True) == [24]


def test_c21_groups_end_where_all_of_them_can():
    world = world_of(FULL, FULL)
    put(world, "abcd", "ab")
    assert settle(world) == 8


def test_c21_a_window_needs_only_its_last_blocks():
    world = world_of(FULL, WINDOW)
    put(world, "abcd", "cd")
    assert settle(world) == 16
    assert leased(world) == {*make_keys("abcd", 0), *make_keys("cd", 1)}


def test_c21_a_hole_in_the_window_moves_the_end_before_it():
    world = world_of(FULL, WINDOW)
    put(world, "abcdef", "abd")
    assert settle(world) == 8
    assert leased(world) == {*make_keys("ab", 0), *make_keys("ab", 1)}


def test_c21_blocks_of_two_sizes_end_together():
    world = world_of(FULL, GroupShape(8))
    put(world, "abcde", "bd")
    assert settle(world) == 16


def test_k12_o4_the_end_leaves_what_the_engine_wants_to_compute():
    world = world_of(FULL, WINDOW)
    put(world, "abcd", "abcd")
    assert settle(world, max_tokens=15) == 12


def test_k12_o3_the_reason_is_that_of_the_first_block_that_is_in_the_way():
    world = world_of(FULL, WINDOW)
    put(world, "abc", "ab")
    push_behind(world)
    world.find_end_point("r", keys_of(world), 24)
    world.answer_all(JobHook.LOOKUP)
    world.find_end_point("r", keys_of(world), 24)
    world.end_step()
    world.answer(world.jobs(JobHook.LOAD)[0], Answer.FAILED, make_keys("b", 1))
    found = world.find_end_point("r", keys_of(world), 24)
    assert (found.tokens, found.reason) == (4, MissReason.TIER_FAILED)
    assert world.coordinator.counters.misses[MissReason.TIER_FAILED] == 1


def test_k12_o3_a_failure_in_group_1_leaves_a_prefix_valid_for_both_and_other_requests_alone():
    world = world_of(FULL, FULL)
    put(world, "abcd", "abcd")
    push_behind(world)
    world.new_request("other")
    keys = keys_of(world)
    for request in ("r", "other"):
        world.find_end_point(request, keys, 24)
    world.answer_all(JobHook.LOOKUP)
    for request in ("r", "other"):
        world.find_end_point(request, keys, 24)
    world.end_step()
    world.answer(world.jobs(JobHook.LOAD)[0], Answer.CORRUPT, make_keys("c", 1))
    for request in ("r", "other"):
        assert settle(world, request) == 8
        prepared, end = world.load_end_point(request, keys, 24)
        assert end == 8
        assert sorted(prepared.keys) == sorted([*make_keys("ab", 0), *make_keys("ab", 1)])
        world.complete_load(prepared.job_id)


# -- what is asked, held and loaded for it


def test_c21_one_call_asks_each_tier_once_about_each_group():
    world = world_of(FULL, WINDOW, tiers=("x", "y"))
    world.find_end_point("r", keys_of(world), 24)
    asked = [(call.tier, call.keys) for call in world.hooks.calls if call.hook == "lookup"]
    full, window = (tuple(make_keys(PROMPT, group)) for group in (0, 1))
    assert asked == [("x", full), ("y", full), ("x", window), ("y", window)]
    prefixes = [world.running[job].job.is_prefix for job in world.jobs(JobHook.LOOKUP)]
    assert prefixes == [True, True, False, False]


def test_c21_only_what_the_end_point_needs_is_loaded():
    world = world_of(FULL, WINDOW)
    put(world, "abcde", "abcd")
    push_behind(world)
    assert settle(world) == 16
    assert sorted(loaded(world)) == sorted([*make_keys("abcd", 0), *make_keys("cd", 1)])


def test_c21_nothing_is_promised_behind_a_key_that_no_tier_has_spoken_about():
    world = world_of(FULL, FULL)
    put(world, "b", "ab")
    push_behind(world)
    put(world, "ac", "a")
    assert not world.find_end_point("r", keys_of(world), 24).is_settled
    assert leased(world) == {*make_keys("a", 0), *make_keys("a", 1)}
    assert settle(world) == 8


def test_c21_nothing_of_a_window_is_loaded_while_the_end_point_may_move():
    world = world_of(FULL, WINDOW)
    put(world, "abcdef", "abcdef")
    push_behind(world)
    world.find_end_point("w", ((), tuple(make_keys("abcdef", 1))), 24)
    world.answer_all(JobHook.LOOKUP)  # of the prefix group nothing is known yet
    found = world.find_end_point("r", keys_of(world), 24)
    world.end_step()
    assert not found.is_settled
    assert loaded(world) == []
    assert settle(world) == 24


def test_c21_promotions_of_several_groups_come_in_waves_within_the_limit():
    world = world_of(FULL, WINDOW, max_promotion_rows=3)
    put(world, "abcd", "abcd")
    push_behind(world)
    assert settle(world) == 16
    loads = [len(call.keys) for call in world.hooks.calls if call.hook == "submit_load"]
    assert loads == [3, 3]


def test_c21_c22_an_end_point_that_does_not_fit_is_shortened_for_all_groups():
    world = world_of(FULL, FULL, num_rows=5)
    for letter in "abcd":
        put(world, letter, letter)
    push_behind(world)
    assert settle(world) == 8
    found = world.find_end_point("r", keys_of(world), 24)
    assert found.reason is MissReason.PRIMARY_FULL
    assert len(leased(world)) == 4


def test_c13_what_one_group_was_promised_is_not_evicted_for_another():
    world = world_of(FULL, WINDOW, num_rows=6)
    put(world, "", "cd")
    put(world, "abcd")
    world.new_request("x")
    prepared = world.prepare_store("x", make_keys("z", 7))
    assert prepared.evicted == make_keys("d", 0)
    world.complete_store(prepared.job_id)
    world.finish("x")
    world.answer_all(JobHook.STORE)
    assert settle(world) == 16  # d of group 0 comes back in the place of z
    assert leased(world) == {*make_keys("abcd", 0), *make_keys("cd", 1)}


# -- loads


@pytest.mark.parametrize("reset", [False, True])
def test_c21_a_load_brings_what_is_promised_or_after_a_reset_a_prefix_valid_for_all(reset):
    world = world_of(FULL, WINDOW)
    put(world, "abcd", "abcd")
    assert settle(world) == 16
    if reset:
        world.reset()
        put(world, "ab", "abcd")
    prepared, end = world.load_end_point("r", keys_of(world), 16)
    assert end == (8 if reset else 16)
    assert len(prepared.keys) == (4 if reset else 6)
    world.settle()
    world.check_at_rest()


def test_c21_nothing_to_load_is_no_job():
    world = world_of(FULL, WINDOW)
    prepared, end = world.load_end_point("r", keys_of(world), 24)
    assert (prepared.keys, end) == ((), 0)


# -- pending answers are remembered


def test_c21_no_key_is_looked_at_while_an_answer_is_pending(monkeypatch):
    world = world_of(FULL)
    put(world, "abcdef")
    push_behind(world)
    keys = tuple(make_keys("abcdefz"))
    calls: list[int] = []
    find_all = world.ledger.find_all

    def count(keys):
        calls.append(len(keys))
        return find_all(keys)

    monkeypatch.setattr(world.ledger, "find_all", count)

    def ask(times: int) -> list[bool]:
        return [world.coordinator.lookup("r", (keys,), world.now).is_settled for _ in range(times)]

    assert ask(10) == [False] * 10
    assert calls == [7], "while the tier has not answered"
    world._act()
    world.answer_all(JobHook.LOOKUP)
    calls.clear()
    assert ask(10) == [False] * 10
    assert calls == [7], "while the promotion has not left"
    world.end_step()
    calls.clear()
    assert ask(10) == [False] * 10
    assert calls == [7], "while the promotion is under way"
    world.answer_all(JobHook.LOAD)
    assert ask(1) == [True]


@pytest.mark.parametrize("event", ["answer", "timeout", "own store", "reset", "other keys"])
def test_c21_k6_o3_a_remembered_answer_ends_with_what_it_waits_for(event):
    world = world_of(FULL)
    keys = tuple(make_keys("ab"))
    assert not world.lookup("r", keys).is_settled
    match event:
        case "answer":
            world.answer_all(JobHook.LOOKUP)
        case "timeout":
            world.advance(2.0)
        case "own store":
            world.put("w", keys)
        case "reset":
            world.reset(ready=False)
        case "other keys":
            keys = ()
    assert world.lookup("r", keys).is_settled


def test_c13_a_remembered_answer_renews_the_leases_it_stands_on():
    world = world_of(FULL, num_rows=2, lease_timeout_s=3.0)
    put(world, "a")
    world.prepare_store("w", make_keys("b"))
    keys = tuple(make_keys("ab"))
    for _ in range(4):
        assert not world.lookup("r", keys).is_settled
        world.advance(2.0)
    assert leased(world) == set(keys)
    world.advance(3.0)
    assert leased(world) == set()
    assert not world.lookup("r", keys).is_settled
    assert leased(world) == set(keys)


def calls_of_an_idle_step(world: World, requests: list[str], keys: tuple[OffloadKey, ...]) -> tuple[int, int]:
    """Python calls made by a step in which nothing happens: by the step itself, and by asking about each request."""
    coordinator = world.coordinator

    def step() -> None:
        coordinator.tick(world.now)
        coordinator.end_step(0, world.now)
        coordinator.take_actions()

    def ask() -> None:
        for request in requests:
            assert not coordinator.lookup(request, (keys,), world.now).is_settled

    ask()
    step()
    ask()  # once more, since the promotions have left
    return count_calls(step), count_calls(ask)


def count_calls(function: Callable[[], None]) -> int:
    """How many Python functions *function* calls, itself among them."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("waits_for", ["lookup", "load"])
def test_k11_an_idle_step_does_nothing_for_the_requests_that_wait(waits_for):
    steps, asks = {}, {}
    for number, blocks in ((1, "ab"), (64, "ab"), (64, PROMPT)):
        world = world_of(FULL)
        put(world, PROMPT)
        push_behind(world)
        requests = [f"r{i}" for i in range(number)]
        world.new_request(*requests)
        keys = tuple(make_keys(blocks))
        if waits_for == "load":
            world.lookup("r", keys)
            world.answer_all(JobHook.LOOKUP)
        steps[number, blocks], asks[number, blocks] = calls_of_an_idle_step(world, requests, keys)
    assert steps[1, "ab"] == steps[64, "ab"] == steps[64, PROMPT] <= 11
    assert asks[64, "ab"] == asks[64, PROMPT] <= 64 * 8
