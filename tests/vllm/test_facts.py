from dataclasses import replace

import pytest

from kvtier_vllm.facts import EngineFacts, Workers, make_namespace
from tests.vllm.facts_of import GROUP, PLAIN


def test_facts_survive_the_way_from_the_worker_to_the_scheduler():
    assert EngineFacts.from_bytes(PLAIN.to_bytes()) == PLAIN


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "a" * 40},
        {"weights_digest": "other"},
        {"config_digest": "other"},
        {"kv_dtype": "float16"},
        {"layout": "other"},
        {"hash_algorithm": "sha256_cbor"},
        {"hash_seed_digest": "other"},
        {"workers": Workers(count=2, tensor=2)},
        {"groups": (replace(GROUP, tokens_per_block=64),)},
        {"groups": (replace(GROUP, layers=("layers.0", "layers.2")),)},
    ],
)
def test_k1_o1_k1_o2_bytes_that_are_not_interchangeable_have_namespaces_of_their_own(change):
    assert make_namespace(replace(PLAIN, **change)).name != make_namespace(PLAIN).name


def test_c02_the_same_engine_has_the_same_namespace():
    assert make_namespace(PLAIN).name == make_namespace(EngineFacts.from_bytes(PLAIN.to_bytes())).name


def test_c02_unknown_weights_are_never_the_same_twice():
    for unknown in (replace(PLAIN, weights_digest=None), replace(PLAIN, config_digest=None)):
        assert make_namespace(unknown).name != make_namespace(unknown).name


def test_v16_an_identity_stands_for_unknown_weights_and_counts_beside_known_ones():
    unknown = replace(PLAIN, weights_digest=None)
    mine, other = (make_namespace(replace(unknown, identity=text)).name for text in ("mine", "other"))
    assert make_namespace(replace(unknown, identity="mine")).name == mine != other
    assert make_namespace(replace(PLAIN, identity="mine")).name not in (mine, make_namespace(PLAIN).name)
    nothing_else = replace(unknown, identity="mine", config_digest=None)
    assert make_namespace(nothing_else).name != make_namespace(nothing_else).name


def test_c43_a_row_holds_the_parts_of_all_workers():
    two = make_namespace(replace(PLAIN, workers=Workers(count=2, tensor=2)))
    assert two.groups[0].block_bytes == 2 * GROUP.block_bytes


def test_k12_o2_a_group_that_is_not_cached_is_left_out_and_the_others_keep_their_number():
    scratch_first = replace(PLAIN, groups=(replace(GROUP, group_id=1, window=64),))
    namespace = make_namespace(scratch_first)
    assert list(namespace.cached_groups) == [1]
    assert namespace.cached_groups[1].window == 64


def test_i17_groups_may_have_blocks_of_different_sizes():
    wide = replace(GROUP, group_id=1, tokens_per_block=96)
    namespace = make_namespace(replace(PLAIN, groups=(replace(GROUP, tokens_per_block=64), wide)))
    assert namespace.tokens_per_block == 32
    assert [namespace.tokens_of(group) for group in namespace.groups] == [64, 96]
