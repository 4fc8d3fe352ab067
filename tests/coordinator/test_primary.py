"""The primary tier (C10 to C13): what a lookup answers, what gets a row, what may be evicted."""

import time

import pytest

from kvtier_core.coordinator.coordinator import Coordinator
from kvtier_core.errors import UnknownRequestError
from kvtier_core.keys import make_offload_key
from kvtier_core.values import LookupState, MissReason, RequestInfo
from tests.policies.every import EVERY
from tests.sim.books import check_books
from tests.sim.scripted import Answer, JobHook
from tests.sim.world import World, generous_limits, make_keys

HIT, PENDING, RETRY, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.RETRY, LookupState.MISS


def world_with(keys: str, num_rows: int = 4) -> World:
    """A pool without tiers, in which *keys* lie and a request "r" has begun."""
    world = World(num_rows)
    world.new_request("w", "r")
    world.put("w", make_keys(keys))
    return world


# -- lookups


def test_c10_an_empty_pool_misses():
    world = World(4)
    world.new_request("r")
    found = world.lookup("r", make_keys("ab"))
    assert (list(found.states), found.hits, found.reason) == ([MISS], 0, MissReason.NOT_STORED)
    assert found.is_settled


def test_c10_many_keys_at_once_end_at_the_first_miss():
    world = world_with("abd")
    found = world.lookup("r", make_keys("abcd"))
    assert list(found.states) == [HIT, HIT, MISS]
    assert found.hits == 2


def test_c10_no_keys_no_answers():
    world = world_with("a")
    found = world.lookup("r", [])
    assert (list(found.states), found.hits, found.is_settled) == ([], 0, True)


def test_c10_groups_of_one_hash_are_apart():
    world = world_with("a")
    assert list(world.lookup("r", make_keys("a", group=1)).states) == [MISS]


def test_c10_a_block_under_way_from_the_device_is_pending():
    world = World(4)
    world.new_request("w", "r")
    prepared = world.prepare_store("w", make_keys("ab"))
    found = world.lookup("r", make_keys("abc"))
    assert list(found.states) == [PENDING, PENDING, MISS]
    assert not found.is_settled
    world.complete_store(prepared.job_id)
    assert list(world.lookup("r", make_keys("abc")).states) == [HIT, HIT, MISS]


def test_c10_a_lookup_asks_a_tier_once_and_does_nothing_else():
    world = World(4, ["a"])
    world.new_request("r")
    assert list(world.lookup("r", make_keys("abc")).states) == [RETRY]
    world.lookup("r", make_keys("abc"))
    assert [call.keys for call in world.hooks.calls if call.hook == "lookup"] == [tuple(make_keys("abc"))]
    assert world.ledger.num_free == 4


def test_c10_a_prefix_ends_at_a_key_that_is_nowhere_and_nothing_behind_it_is_asked_for():
    world = World(4, ["a"])
    world.new_request("w", "r")
    world.put("w", make_keys("x"))
    assert world.fetch("r", make_keys("y")).hits == 0
    asked = len(world.hooks.calls)
    found = world.lookup("r", make_keys("xyz"))
    assert (list(found.states), found.reason) == ([HIT, MISS], MissReason.NOT_STORED)
    assert len(world.hooks.calls) == asked
    assert world.ledger.leases == set(make_keys("x"))


def test_c13_c26_a_request_that_was_finished_is_promised_nothing_while_its_last_store_is_under_way():
    world = world_with("ab")
    prepared = world.prepare_store("r", make_keys("c"))
    world.finish("r")
    known = world.coordinator
    for use in (
        lambda: known.lookup("r", [make_keys("ab")], world.now),
        lambda: known.prepare_load("r", make_keys("ab")),
        lambda: known.prepare_store("r", make_keys("d"), world.now),
    ):
        with pytest.raises(UnknownRequestError, match="'r' was finished"):
            use()
    assert not world.ledger.leases
    world.complete_store(prepared.job_id)
    world.settle()
    world.check_at_rest()


def test_a_request_that_is_not_known_is_named():
    world = World(4)
    for use in (
        lambda: world.lookup("nobody", make_keys("a")),
        lambda: world.prepare_load("nobody", make_keys("a")),
        lambda: world.coordinator.prepare_store("nobody", make_keys("a"), world.now),
        lambda: world.coordinator.is_request_level("nobody"),
        lambda: world.coordinator.misses("nobody"),
        lambda: world.finish("nobody"),
    ):
        with pytest.raises(UnknownRequestError, match="'nobody' was never begun, or is over"):
            use()


# -- prepare_store


def test_c11_prepare_store_keeps_order_and_drops_what_is_held():
    world = world_with("b")
    prepared = world.prepare_store("r", make_keys("cbda"))
    assert prepared.keys == make_keys("cda")
    assert len(set(prepared.rows)) == 3
    assert prepared.evicted == []


def test_c11_duplicates_use_one_row():
    world = World(4)
    world.new_request("r")
    assert world.prepare_store("r", make_keys("abab")).keys == make_keys("ab")


def test_c11_duplicates_of_what_is_held_leave_the_order_of_eviction_whole():
    world = world_with("ab", num_rows=3)
    assert list(world.prepare_store("r", make_keys("aa")).keys) == []
    assert list(world.prepare_store("r", make_keys("cde")).evicted) == make_keys("ba")


def test_c11_nothing_new_has_no_job():
    world = world_with("ab")
    prepared = world.prepare_store("r", make_keys("ab"))
    assert (prepared.keys, prepared.rows) == ((), ())
    assert not world.coordinator.has_pending_work


def test_c11_evicts_as_many_as_needed_the_longest_unused_first():
    world = world_with("a")
    world.new_request("v", "u")
    world.put("v", make_keys("b"))
    world.put("u", make_keys("cd"))
    prepared = world.prepare_store("r", make_keys("ef"))
    assert prepared.evicted == make_keys("ab")


def test_c11_never_evicts_a_key_asked_for():
    world = world_with("a")
    world.put("w", make_keys("bcd"))
    prepared = world.prepare_store("r", make_keys("xya"))
    assert sorted(prepared.keys) == sorted(make_keys("xy"))
    assert not set(prepared.evicted) & set(make_keys("a"))


def test_c11_none_and_nothing_changed_when_room_cannot_be_made():
    world = world_with("abcd")
    assert world.prepare_store("r", make_keys("axyzw")) is None
    assert list(world.lookup("r", make_keys("abcd")).states) == [HIT] * 4


def test_c11_more_keys_than_rows_is_none():
    world = World(2)
    world.new_request("r")
    assert world.prepare_store("r", make_keys("abc")) is None
    assert world.ledger.num_free == 2


def test_c11_the_tail_of_a_prefix_leaves_before_its_head():
    world = world_with("abcd")
    assert world.prepare_store("r", make_keys("x")).evicted == make_keys("d")


# -- visibility


def test_c12_a_failed_device_store_frees_its_rows():
    world = World(2)
    world.new_request("r")
    prepared = world.prepare_store("r", make_keys("ab"))
    world.complete_store(prepared.job_id, success=False)
    assert list(world.lookup("r", make_keys("a")).states) == [MISS]
    assert world.ledger.num_free == 2


def test_c12_a_failed_device_store_goes_to_no_tier():
    world = World(2, ["a"])
    world.new_request("r")
    prepared = world.prepare_store("r", make_keys("ab"))
    world.complete_store(prepared.job_id, success=False)
    assert world.jobs(JobHook.STORE) == []


def test_c12_a_device_that_is_too_slow_loses_its_keys_and_keeps_its_rows():
    world = World(2, limits=generous_limits(2, device_timeout_s=5.0))
    world.new_request("w", "r")
    prepared = world.prepare_store("w", make_keys("ab"))
    world.advance(5.0)
    assert list(world.lookup("r", make_keys("a")).states) == [MISS]
    assert world.prepare_store("r", make_keys("c")) is None
    assert not world.coordinator.has_pending_work
    world.complete_store(prepared.job_id)
    assert list(world.lookup("r", make_keys("a")).states) == [MISS]
    assert world.ledger.num_free == 2


def test_c12_a_load_takes_no_block_whose_bytes_are_arriving():
    world = world_with("ab")
    world.prepare_store("w", make_keys("c"))
    assert world.prepare_load("r", make_keys("abc")).keys == make_keys("ab")
    assert world.prepare_load("r", make_keys("c")).keys == ()


# -- pins and leases


def test_c13_half_written_rows_are_not_evicted():
    world = World(2)
    world.new_request("w", "r")
    world.prepare_store("w", make_keys("ab"))
    assert world.prepare_store("r", make_keys("c")) is None


def test_c13_a_device_load_pins_its_rows():
    world = world_with("ab", num_rows=2)
    prepared = world.prepare_load("r", make_keys("ab"))
    world.finish("r")
    assert world.prepare_store("w", make_keys("c")) is None
    world.complete_load(prepared.job_id)
    assert world.prepare_store("w", make_keys("c")) is not None


def test_c13_two_loads_pin_twice():
    world = world_with("ab", num_rows=2)
    first = world.prepare_load("r", make_keys("ab"))
    second = world.prepare_load("w", make_keys("ab"))
    world.complete_load(first.job_id)
    assert world.prepare_store("w", make_keys("c")) is None
    world.complete_load(second.job_id)
    assert world.prepare_store("w", make_keys("c")) is not None


def test_c13_prepare_load_ends_the_lease():
    world = world_with("ab", num_rows=2)
    world.lookup("r", make_keys("ab"))
    prepared = world.prepare_load("r", make_keys("a"))
    world.complete_load(prepared.job_id)
    assert world.prepare_store("w", make_keys("xy")) is None, "b is leased still"
    assert world.prepare_store("w", make_keys("x")).evicted == make_keys("a")


def test_c10_c13_a_lookup_of_ready_blocks_promises_them_without_a_look_at_one(monkeypatch):
    world = world_with("abc")

    def looked(_key):
        raise AssertionError("a look at a block")

    monkeypatch.setattr(world.ledger, "find", looked)
    monkeypatch.setattr(world.ledger, "find_all", looked)
    lookup = world.coordinator.lookup
    found = lookup("r", [make_keys("abc")], world.now)
    assert (found.tokens, found.ready_tokens, found.state) == (3, 3, HIT)
    assert world.ledger.leases == set(make_keys("abc"))
    monkeypatch.undo()
    found = lookup("w", [make_keys("abx")], world.now)
    assert (found.tokens, found.ready_tokens, found.state) == (2, 2, MISS)
    assert [world.ledger.num_leases(key) for key in make_keys("abc")] == [2, 2, 1]


def test_c11_c13_when_promises_end_the_tail_of_the_prefix_leaves_first_whatever_was_promised_before():
    world = world_with("abcd")
    for _ in range(3):
        world.lookup("r", make_keys("abcd"))
        world.complete_load(world.prepare_load("r", make_keys("cd")).job_id)
    state = world.coordinator.state.requests["r"]
    assert (state.leases, state.promised) == (set(make_keys("ab")), make_keys("abcd"))
    world.finish("r")
    assert (state.leases, state.promised) == (set(), [])
    world.new_request("s")
    world.lookup("s", make_keys("abcd"))
    world.finish("s")
    evicted = [world.prepare_store("w", make_keys(new)).evicted for new in "wxyz"]
    assert evicted == [make_keys(old) for old in "dcba"]


def test_c14_an_offer_of_a_promised_block_takes_nothing_from_its_use():
    world = world_with("ab", num_rows=2)
    oldest = world.ledger.find(make_keys("b")[0])
    world.lookup("r", [oldest.key])
    world.prepare_store("r", [oldest.key])
    world.finish("r")
    assert world.prepare_store("w", make_keys("x")).evicted == make_keys("a")


def test_c13_prepare_load_gives_the_leading_blocks_that_are_there():
    world = world_with("ab")
    assert world.prepare_load("r", make_keys("axb")).keys == make_keys("a")
    assert world.prepare_load("r", make_keys("xab")).keys == ()


def test_k3_o1_what_a_lookup_found_stays_until_it_is_loaded():
    world = world_with("abcd")
    assert world.lookup("r", make_keys("abcd")).hits == 4
    world.new_request("s")
    assert world.prepare_store("s", make_keys("xy")) is None
    assert world.prepare_load("r", make_keys("abcd")).keys == make_keys("abcd")


@pytest.mark.parametrize("end", ["finish", "reset", "timeout", "load"])
def test_k8_o3_c13_leases_end_however_the_request_ends(end):
    world = world_with("abcd")
    assert world.lookup("r", make_keys("abcd")).hits == 4
    match end:
        case "finish":
            world.finish("r")
        case "reset":
            world.reset()
        case "timeout":
            world.advance(30.0)
        case "load":
            world.complete_load(world.prepare_load("r", make_keys("abcd")).job_id)
    assert world.prepare_store("w", make_keys("efgh")) is not None


def test_c13_a_lookup_renews_the_lease():
    world = world_with("ab", num_rows=2)
    for _ in range(4):
        world.lookup("r", make_keys("ab"))
        world.advance(20.0)
    assert world.prepare_store("w", make_keys("c")) is None


def test_c13_two_leases_of_one_block_end_apart():
    world = world_with("a", num_rows=1)
    world.new_request("s")
    world.lookup("r", make_keys("a"))
    world.lookup("r", make_keys("a"))
    world.lookup("s", make_keys("a"))
    world.finish("r")
    assert world.prepare_store("w", make_keys("b")) is None
    world.finish("s")
    assert world.prepare_store("w", make_keys("b")) is not None


def test_c13_a_lease_on_a_block_whose_store_fails_is_gone():
    world = World(1)
    world.new_request("w", "r")
    prepared = world.prepare_store("w", make_keys("a"))
    world.lookup("r", make_keys("a"))
    world.complete_store(prepared.job_id, success=False)
    world.put("w", make_keys("b"))
    world.finish("r")
    assert world.prepare_store("w", make_keys("c")).evicted == make_keys("b")


def test_k3_o3_a_full_pool_says_so_at_once_and_recovers():
    world = World(2, ["a"])
    world.new_request("w", "r")
    world.put("w", make_keys("x"))
    world.put("w", make_keys("a"))
    world.put("w", make_keys("b"))
    loading = world.prepare_load("w", make_keys("b"))
    world.put("w", make_keys("c"))
    second = world.prepare_load("w", make_keys("c"))
    assert world.prepare_store("r", make_keys("y")) is None
    found = world.fetch("r", make_keys("x"))
    assert (list(found.states), found.reason) == ([MISS], MissReason.PRIMARY_FULL)
    world.complete_load(loading.job_id)
    assert world.fetch("r", make_keys("x")).hits == 1
    world.complete_load(second.job_id)
    assert world.prepare_store("r", make_keys("y")) is not None


@pytest.mark.parametrize("success", [True, False])
def test_c13_counts_return_to_zero(success):
    world = World(4, ["a"])
    world.new_request("w", "r")
    prepared = world.prepare_store("w", make_keys("ab"))
    world.lookup("r", make_keys("ab"))
    world.complete_store(prepared.job_id, success=success)
    world.lookup("r", make_keys("ab"))
    world.settle()
    world.check_at_rest()


@pytest.mark.parametrize("hold", ["prepare_load", "lookup"])
def test_k11_o1_a_store_into_a_held_pool_looks_at_no_block(monkeypatch, hold):
    world = World(64)
    world.new_request("w")
    for letter in range(64):
        world.put("w", make_keys(chr(0x100 + letter)))
        getattr(world, hold)("w", make_keys(chr(0x100 + letter)))
    monkeypatch.setattr(
        world.ledger._policy, "evict", lambda *_: pytest.fail("the policy was asked for victims")
    )
    assert world.prepare_store("w", make_keys("ab")) is None


@pytest.mark.parametrize("hold", ["pinned", "promised"])
@pytest.mark.parametrize("policy", EVERY)
def test_k11_o1_a_thousand_stores_beside_200_000_held_blocks(policy, hold):
    held, spare = 200_000, 8
    num_rows = held + spare
    coordinator = Coordinator(num_rows, EVERY[policy](num_rows), [], generous_limits(num_rows))
    coordinator.new_request(RequestInfo(request_id="r"), 0.0)
    keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(num_rows + 1000)]
    stored = coordinator.prepare_store("r", keys[:num_rows], 0.0)
    coordinator.complete_store(stored.job_id, success=True, now=0.0)
    if hold == "pinned":
        coordinator.prepare_load("r", keys[:held])
    else:
        coordinator.lookup("r", [keys[:held]], 0.0)
    begin = time.thread_time()
    for key in keys[num_rows:]:
        stored = coordinator.prepare_store("r", [key], 0.0)
        coordinator.complete_store(stored.job_id, success=True, now=0.0)
    took = time.thread_time() - begin
    check_books(coordinator.state)
    assert took < 1.0, "one walk over the held blocks by each call would take many times that"
    assert coordinator.prepare_store("r", make_keys("abcdefghi"), 0.0) is None, "eight rows are not held"
    print(f"{policy}, {hold}: {took * 1e3:.1f} ms")


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
def test_c14_recency_counts_once_per_request_and_key(policy):
    world = World(4, policy=policy)
    world.new_request("v", "w", "r", "s")
    world.put("v", make_keys("ab"))
    world.put("w", make_keys("cd"))
    block = world.ledger.find(make_keys("a")[0])
    world.lookup("r", make_keys("a"))
    world.lookup("r", make_keys("a"))
    loading = world.prepare_load("r", make_keys("a"))
    assert block.uses == 1
    world.lookup("r", make_keys("a"))
    world.finish("r")
    assert block.uses == 1, "it was used before by this request"
    world.lookup("s", make_keys("a"))
    world.finish("s")
    assert block.uses == 2
    world.complete_load(loading.job_id)
    assert world.prepare_store("w", make_keys("xy")).evicted == make_keys("bd")


# -- requests


def test_c26_a_request_id_is_unique_until_it_is_wholly_over():
    world = World(2)
    world.new_request("r")
    prepared = world.prepare_store("r", make_keys("a"))
    world.finish("r")
    with pytest.raises(ValueError, match="still known"):
        world.coordinator.new_request(RequestInfo(request_id="r"), world.now)
    world.complete_store(prepared.job_id)
    world.new_request("r")


def test_c60_a_block_that_was_evicted_is_told_from_one_not_stored():
    world = world_with("a", num_rows=1)
    world.put("w", make_keys("b"))
    assert world.lookup("r", make_keys("a")).reason is MissReason.EVICTED
    assert world.lookup("r", make_keys("z")).reason is MissReason.NOT_STORED


def test_c60_a_miss_counts_once_per_request_and_key():
    world = world_with("a")
    for _ in range(3):
        world.lookup("r", make_keys("z"))
    world.lookup("w", make_keys("z"))
    assert world.coordinator.counters.misses == {MissReason.NOT_STORED: 2}


def test_c60_a_block_computed_after_its_promotion_failed_comes_from_the_pool():
    world = World(4, ["a"])
    world.new_request("w", "r")
    world.put("w", make_keys("a"))
    world.reset(tiers=False)
    world.lookup("r", make_keys("a"))
    world.answer_all(JobHook.LOOKUP)
    world.lookup("r", make_keys("a"))
    world.end_step()
    world.answer_all(JobHook.LOAD, answer=Answer.FAILED)
    world.put("w", make_keys("a"))
    assert world.prepare_load("r", make_keys("a")).sources == ["pool"]


def test_c60_hits_count_by_where_they_came_from():
    world = World(4, ["a"])
    world.new_request("w", "r")
    world.put("w", make_keys("ab"))
    world.reset(tiers=False)
    world.put("w", make_keys("x"))
    world.prepare_load("r", make_keys("x"))
    assert world.fetch("r", make_keys("ab")).hits == 2
    assert world.prepare_load("r", make_keys("ab")).sources == ["a", "a"]
    assert world.coordinator.counters.hits == {"pool": 1, "a": 2}


def test_c13_a_key_named_twice_in_a_load_is_pinned_and_let_go_like_any_other():
    world = World(4)
    world.new_request("r", "s")
    world.put("r", make_keys("ab"))
    a, b = make_keys("ab")
    assert world.lookup("s", [a, b]).hits == 2
    prepared = world.coordinator.prepare_load("s", [a, a, b])
    assert list(prepared.keys) == [a, a, b]
    world.coordinator.complete_load(prepared.job_id)
    world.finish("r", "s")
    world.settle()
    world.check_at_rest()
