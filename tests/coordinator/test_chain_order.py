"""Of a chain the tail leaves the pool before the head, however its blocks came (C14)."""

import pytest

from kvtier_core.coordinator.endpoints import GroupShape
from tests.policies.every import EVERY
from tests.sim.scripted import JobHook
from tests.sim.world import World, make_keys


def held(world: World, letters: str, group: int = 0) -> str:
    """Which of these blocks the pool holds."""
    keys = make_keys(letters, group)
    return "".join(
        letter
        for letter, block in zip(letters, world.ledger.find_all(keys), strict=True)
        if block is not None
    )


def offer(world: World, request: str, *pieces: str) -> None:
    """The request has computed these blocks, of which the pool may hold some."""
    for piece in pieces:
        prepared = world.prepare_store(request, make_keys(piece))
        assert prepared is not None
        if prepared.keys:
            world.complete_store(prepared.job_id)


def write(world: World, request: str, *pieces: str) -> None:
    world.new_request(request)
    offer(world, request, *pieces)
    world.finish(request)


@pytest.mark.parametrize("policy", EVERY)
def test_r3_pieces_of_one_prompt_leave_from_its_end(policy):
    world = World(8, policy=policy)
    write(world, "r", "ab", "cd", "ef")
    write(world, "s", "wx", "yz")
    assert held(world, "abcdef") == "abcd"


@pytest.mark.parametrize("policy", EVERY)
def test_r3_a_request_that_never_ends_keeps_its_head_too(policy):
    world = World(8, policy=policy)
    world.new_request("r", "s")
    for piece in ("abc", "def", "ghi", "jkl"):
        world.put("r", make_keys(piece))
    assert held(world, "abcde") == "abcde"
    world.put("s", make_keys("xy"))
    assert held(world, "abcd") == "abcd"


def test_r3_a_chain_is_as_recent_as_its_last_piece():
    world = World(6)
    world.new_request("r")
    offer(world, "r", "ab")
    write(world, "s", "xy")
    offer(world, "r", "cd")
    write(world, "t", "12")
    assert held(world, "abcdxy") == "abcd"


def test_r3_what_was_read_and_what_was_added_are_one_chain():
    world = World(8)
    write(world, "r", "abc", "def")
    world.new_request("s")
    assert world.lookup("s", make_keys("abc")).hits == 3
    world.complete_load(world.prepare_load("s", make_keys("abc")).job_id)
    world.put("s", make_keys("xy"))
    write(world, "t", "123", "4")
    assert held(world, "abcdef") == "abc", "the end of the first prompt, which nobody has read, left first"
    assert held(world, "xy") == "x", "then the end of the second one"


def test_r3_a_shared_beginning_belongs_to_whom_used_it_last():
    world = World(9)
    write(world, "r", "abc", "de")
    write(world, "s", "abc", "xy")
    write(world, "t", "12", "34")
    assert held(world, "abcde") == "abc"
    assert held(world, "xy") == "xy"


def test_r3_what_was_promised_and_never_loaded_comes_before_what_was_computed_behind_it():
    world = World(6)
    write(world, "r", "abc")
    world.new_request("s")
    world.lookup("s", make_keys("abc"))
    offer(world, "s", "abc", "xyz")
    world.finish("s")
    write(world, "t", "12", "34")
    assert held(world, "abcxyz") == "ab"


def test_r3_a_preempted_request_that_comes_back_keeps_the_order_of_its_prompt():
    world = World(8)
    world.new_request("r")
    world.put("r", make_keys("abc"))
    world.put("r", make_keys("de"))
    assert world.lookup("r", make_keys("abcde")).hits == 5
    world.complete_load(world.prepare_load("r", make_keys("abcde")).job_id)
    world.put("r", make_keys("fg"))
    write(world, "s", "123", "4")
    assert held(world, "abcdefg") == "abcd"


def test_r3_pieces_whose_device_stores_end_out_of_turn_leave_in_the_order_of_the_prompt():
    world = World(6)
    world.new_request("r")
    first = world.prepare_store("r", make_keys("abc"))
    second = world.prepare_store("r", make_keys("def"))
    assert first is not None
    assert second is not None
    world.complete_store(second.job_id)
    world.complete_store(first.job_id)
    world.finish("r")
    write(world, "s", "xyz")
    assert held(world, "abcdef") == "abc"


def test_r3_what_a_tier_brought_is_part_of_the_prompt():
    world = World(6, ["one"])
    write(world, "r", "abcd")
    world.answer_all(JobHook.STORE)
    world.reset(tiers=False)
    write(world, "s", "ab")
    world.new_request("t")
    assert world.fetch("t", make_keys("abcd")).hits == 4
    world.complete_load(world.prepare_load("t", make_keys("abcd")).job_id)
    world.finish("t")
    write(world, "u", "wx", "yz")
    world.answer_all(JobHook.STORE)
    assert held(world, "abcd") == "ab"


def test_r3_groups_leave_by_the_tokens_that_their_blocks_end_at():
    world = World(10, groups=(GroupShape(4), GroupShape(4, 8)))
    full, window = make_keys("abcd"), make_keys("abcd", 1)
    world.new_request("r")
    world.put("r", [key for pair in zip(full, window, strict=True) for key in pair])
    world.finish("r")
    world.new_request("s")
    assert world.find_end_point("s", [full, window], 16).ready_tokens == 16
    prepared, _ = world.load_end_point("s", [full, window], 16)
    world.complete_load(prepared.job_id)
    world.finish("s")
    write(world, "t", "wxyz")
    assert held(world, "abcd") == "abcd"
    assert held(world, "abcd", 1) == "cd", "the window's blocks that nobody used left first"
    write(world, "u", "pq")
    assert held(world, "abcd") == "abc"
    assert held(world, "abcd", 1) == "c", "then of both groups those of the end"


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_c14_used_blocks_leave_from_the_end_though_room_is_made_one_by_one(policy):
    prompt = "abcdefg"
    world = World(8, policy=policy)
    write(world, "r", prompt)
    world.new_request("s")
    assert world.lookup("s", make_keys(prompt)).hits == len(prompt)
    world.complete_load(world.prepare_load("s", make_keys(prompt)).job_id)
    world.finish("s")
    for letter in "123456789":
        write(world, letter, letter)
        assert prompt.startswith(held(world, prompt))
    assert held(world, prompt) != prompt


@pytest.mark.parametrize("policy", EVERY)
def test_r3_what_was_promised_and_not_loaded_leaves_before_what_was(policy):
    world = World(10, policy=policy)
    write(world, "r", "abcdefgh")
    world.new_request("s")
    assert world.lookup("s", make_keys("abcdefgh")).hits == 8
    world.complete_load(world.prepare_load("s", make_keys("abcde")).job_id)
    world.finish("s")
    write(world, "t", "123456")
    assert held(world, "abcdefgh") == "abcd"
