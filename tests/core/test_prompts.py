"""Prompts: blocks and keys of each group, however the tokens arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_core.keys import RequestIdentity, get_offload_group_idx, hash_blocks, make_offload_key
from kvtier_core.prompts import HashedPrompt

SHAPES = (GroupShape(4), GroupShape(12), GroupShape(8, window=10))
INDICES = (0, 2, 5)
NOBODY = RequestIdentity()


def prompt_of(*pieces: list[int]) -> HashedPrompt:
    prompt = HashedPrompt(NOBODY, 4, SHAPES, INDICES)
    for piece in pieces:
        prompt.extend(piece)
    return prompt


@given(st.lists(st.lists(st.integers(0, 9), max_size=15), max_size=6))
def test_c01_tokens_in_pieces_make_the_same_blocks_as_at_once(pieces):
    at_once = prompt_of([token for piece in pieces for token in piece])
    in_pieces = prompt_of(*pieces)
    assert in_pieces.blocks == at_once.blocks
    assert in_pieces.loadable_keys == at_once.loadable_keys
    assert in_pieces.num_tokens == at_once.num_tokens


def test_c01_a_larger_block_takes_the_hash_at_its_end():
    tokens = list(range(25))
    hashes = hash_blocks(tokens, 4, NOBODY)
    prompt = prompt_of(tokens)
    assert prompt.loadable_keys == (
        tuple(make_offload_key(block_hash, 0) for block_hash in hashes),
        tuple(make_offload_key(hashes[i], 2) for i in (2, 5)),
        tuple(make_offload_key(hashes[i], 5) for i in (1, 3, 5)),
    )


def test_blocks_come_in_the_order_they_end():
    prompt = prompt_of(list(range(25)))
    assert [(block.end, get_offload_group_idx(block.key)) for block in prompt.blocks] == [
        (4, 0),
        (8, 0),
        (8, 5),
        (12, 0),
        (12, 2),
        (16, 0),
        (16, 5),
        (20, 0),
        (24, 0),
        (24, 2),
        (24, 5),
    ]
    assert [prompt.count_within(tokens) for tokens in (0, 3, 4, 11, 12, 23, 24, 99)] == [
        0,
        0,
        1,
        3,
        5,
        8,
        11,
        11,
    ]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_k12_o4_one_token_is_never_loadable(tokens, blocks):
    prompt = prompt_of(list(range(tokens)))
    assert len(prompt.loadable_keys[0]) == blocks
    assert prompt.max_loadable == max(0, tokens - 1)


def test_c21_the_loadable_keys_are_one_object_until_tokens_come():
    prompt = prompt_of(list(range(25)))
    assert prompt.loadable_keys is prompt.loadable_keys
    before = prompt.loadable_keys
    prompt.extend([1])
    assert prompt.loadable_keys is not before


def test_what_is_no_token_changes_nothing():
    prompt = prompt_of(list(range(10)))
    with pytest.raises(ValueError, match="token ids"):
        prompt.extend([1.5, 2, 3])  # type: ignore[list-item]
    assert (prompt.num_tokens, len(prompt.blocks)) == (10, 3)
    prompt.extend([10, 11])
    assert prompt.blocks == prompt_of(list(range(12))).blocks
