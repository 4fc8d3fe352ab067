"""A session over several KV groups (K12): keys for each, one end for all, and what happens when one of them fails."""

from collections.abc import Callable, Iterator

import pytest

from kvtier_core.namespace import GroupSpec
from kvtier_testing.faulty import FaultyTier
from tests.session.grouped import APART, PAYLOAD, GroupedToy
from tests.session.toy import PATIENCE_S

FULL = GroupSpec(layers=("0",), block_bytes=PAYLOAD)
OTHER = GroupSpec(layers=("1",), block_bytes=PAYLOAD)
WINDOW = GroupSpec(layers=("1",), block_bytes=PAYLOAD, window=8)
WIDE = GroupSpec(layers=("1",), block_bytes=PAYLOAD, tokens_per_block=8)
PROMPT = list(range(1, 26))  # six blocks of four tokens, and one token


@pytest.fixture
def tiers() -> dict[str, FaultyTier]:
    """The toy's tiers, by name."""
    return {}


@pytest.fixture
def make_toy(tiers: dict[str, FaultyTier]) -> Iterator[Callable[..., GroupedToy]]:
    toys: list[GroupedToy] = []

    def make(*groups: GroupSpec, tokens_per_block: int = 4, num_rows: int = 32) -> GroupedToy:
        toys.append(GroupedToy(groups, tokens_per_block, num_rows, tiers))
        return toys[-1]

    yield make
    for toy in toys:
        toy.session.close(PATIENCE_S)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, OTHER), (FULL, WINDOW), (FULL, WIDE), (WINDOW,)])
def test_k12_a_prompt_comes_back_from_the_pool_and_from_a_tier(make_toy, groups):
    toy = make_toy(*groups)
    assert toy.run("a", PROMPT) == 0
    assert toy.run("b", PROMPT) == 24
    toy.empty_pool()
    assert toy.run("c", PROMPT) == 24
    assert toy.session.stats()["hit_tokens"] == {"pool": 24, "one": 24}


def test_k12_of_a_window_only_the_last_blocks_are_loaded(make_toy):
    toy = make_toy(FULL, WINDOW)
    toy.run("a", PROMPT)
    toy.run("b", PROMPT)
    assert toy.device.loaded == [0, 1, 2, 3, 4, 5, APART + 4, APART + 5]


def test_k12_groups_of_other_block_sizes_end_at_a_block_of_each(make_toy):
    toy = make_toy(FULL, WIDE)
    toy.run("a", PROMPT[:21])
    assert toy.run("b", PROMPT[:21]) == 16


def test_k12_o1_the_same_tokens_have_a_key_in_each_group(make_toy):
    toy = make_toy(FULL, OTHER)
    toy.run("a", PROMPT)
    [tier] = toy._tiers.values()
    stored = tier.blocks[toy.namespace.name]
    assert len(stored) == 12
    assert {key[-1] for key in stored} == {0, 1}


def test_k12_o2_a_group_that_is_not_cached_is_left_out_whatever_its_size(make_toy):
    groups = (
        GroupSpec(layers=("0",), block_bytes=PAYLOAD, tokens_per_block=3584),
        GroupSpec(layers=("1",), block_bytes=17, tokens_per_block=4, cacheable=False),
        GroupSpec(layers=("2",), block_bytes=PAYLOAD),
    )
    toy = make_toy(*groups, tokens_per_block=64, num_rows=200)
    prompt = list(range(3584 + 100))
    toy.run("a", prompt)
    assert toy.run("b", prompt) == 3584
    assert toy.device.loaded == [0, *range(2 * APART, 2 * APART + 56)]


def test_k12_o3_a_device_failure_in_group_1_means_recompute_and_other_requests_go_on(make_toy):
    toy = make_toy(FULL, OTHER)
    toy.run("a", PROMPT)
    session, ids = toy.session, toy.ids(len(PROMPT))
    toy.device.failing_groups = {1}
    session.begin("b", PROMPT)
    session.load("b", session.wait_matched("b", PATIENCE_S), ids)
    assert session.wait_loaded("b", PATIENCE_S) == 0
    assert session.request_hits("b") == {}
    toy.compute(PROMPT, ids)
    session.computed("b", len(PROMPT), ids)
    toy.device.failing_groups = set()
    assert toy.run("c", PROMPT) == 24
    session.end("b")


def test_k12_o3_a_tiers_bad_block_in_group_1_leaves_a_prefix_valid_for_both(make_toy):
    toy = make_toy(FULL, OTHER)
    toy.run("a", PROMPT)
    toy.empty_pool()
    [tier] = toy._tiers.values()
    toy.session.begin("probe", PROMPT)
    bad = toy.session._requests["probe"].prompt.loadable_keys[1][3]
    stored = tier.blocks[toy.namespace.name]
    stored[bad] = bytes(len(stored[bad]))
    assert toy.run("b", PROMPT) == 12
    assert toy.session.wait_matched("probe", PATIENCE_S) == 24, "b has computed it anew"


def test_k12_what_a_window_did_not_load_is_not_stored(make_toy):
    toy = make_toy(FULL, WINDOW)
    toy.run("a", PROMPT)
    toy.device.stored.clear()
    session, ids = toy.session, toy.ids(len(PROMPT) + 8)
    toy.device.blocks.clear()
    session.begin("b", PROMPT, params={"do_remote_decode": True})
    session.load("b", session.wait_matched("b", PATIENCE_S), ids)
    assert session.wait_loaded("b", PATIENCE_S) == 24
    session.reset_cache()
    session.abort("b", PATIENCE_S)  # its blocks are gone, and the pool's too
    session.begin("b", PROMPT, params={"do_remote_decode": True})
    toy.compute(PROMPT, ids)
    ids[1][:3] = [-1, -1, -1]  # the engine gave these up when they left the window
    session.computed("b", len(PROMPT), ids)
    session.end("b")
    assert session.flush(PATIENCE_S)
    assert sorted(toy.device.stored) == [0, 1, 2, 3, 4, 5, APART + 3, APART + 4, APART + 5]


def test_k12_o4_of_a_prompt_of_whole_blocks_one_token_is_left(make_toy):
    toy = make_toy(FULL, WINDOW)
    toy.run("a", PROMPT[:24])
    assert toy.run("b", PROMPT[:24]) == 20


def test_k12_generated_tokens_are_stored_for_every_group(make_toy):
    toy = make_toy(FULL, WIDE)
    session = toy.session
    ids = toy.ids(40)
    session.begin("a", PROMPT[:7])
    tokens = PROMPT[:7]
    for token in range(50, 60):
        tokens.append(token)
        session.append("a", [token])
        toy.compute(tokens, ids)
        session.computed("a", len(tokens), ids)
    session.end("a")
    assert session.flush(PATIENCE_S)
    assert toy.run("b", tokens) == 16


def test_k12_block_ids_of_several_groups_are_named_by_group(make_toy):
    toy = make_toy(FULL, OTHER)
    toy.session.begin("a", PROMPT)
    with pytest.raises(ValueError, match=r"KV groups \[0, 1\]: name the device blocks of each"):
        toy.session.computed("a", 25, [0, 1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="only 2 device blocks given of KV group 1"):
        toy.session.computed("a", 25, {0: [0, 1, 2, 3, 4, 5], 1: [7, 8]})
    with pytest.raises(ValueError, match="only 0 device blocks of KV group 1"):
        toy.session.load("a", 24, {0: [0, 1, 2, 3, 4, 5]})
    toy.session.end("a")


def test_c25_whole_requests_of_several_groups_are_given_whole(make_toy):
    toy = make_toy(FULL, WINDOW)
    session, ids = toy.session, toy.ids(len(PROMPT))
    session.begin("a", PROMPT, params={"kvtier": {"store_tiers": []}})
    toy.compute(PROMPT, ids)
    session.computed("a", 25, ids)
    assert session.stats()["tiers"]["one"]["stored_blocks"] == 0
    session.begin("b", PROMPT, params={"do_remote_decode": True})
    session.load("b", session.wait_matched("b", PATIENCE_S), ids)
    session.wait_loaded("b", PATIENCE_S)
    session.computed("b", 25, ids)
    session.end("b")
    assert session.flush(PATIENCE_S)
    # Of the window, what was loaded; of the prefix, all.
    assert session.stats()["tiers"]["one"]["stored_blocks"] == 8
