from dataclasses import replace

import pytest

from kvtier_core import UnsupportedModelError
from kvtier_vllm.facts import EngineFacts, check_engine, check_persistence, make_namespace
from tests.vllm.facts_of import GROUP, PLAIN


def test_facts_survive_the_way_from_the_worker_to_the_scheduler():
    assert EngineFacts.from_bytes(PLAIN.to_bytes()) == PLAIN


def test_a_plain_engine_is_served():
    check_engine(PLAIN)
    check_persistence(PLAIN, {"disk": True})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"groups": (GROUP, replace(GROUP, group_id=1, tokens_per_block=64))},
            "blocks of 32 and 64 tokens",
        ),
        (
            {"groups": (replace(GROUP, kinds=("FullAttentionSpec", "MambaSpec")),)},
            "'layers.1' keeps MambaSpec",
        ),
        ({"groups": (replace(GROUP, window=64),), "blocks_per_chunk": 2}, "sliding windows"),
        ({"num_workers": 2}, "pipeline and context parallelism"),
        ({"num_nodes": 2}, "2 hosts"),
        ({"canonical_layout": True}, "canonical_layout"),
    ],
)
def test_c43_what_is_unsafe_is_refused_by_name(change, says):
    with pytest.raises(UnsupportedModelError, match=says) as raised:
        check_engine(replace(PLAIN, **change))
    assert "'toy'" in str(raised.value)


def test_every_reason_is_told_at_once():
    with pytest.raises(UnsupportedModelError) as raised:
        check_engine(replace(PLAIN, num_nodes=2, canonical_layout=True))
    assert "2 hosts" in str(raised.value)
    assert "canonical_layout" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hash_algorithm": "xxhash"}, "'xxhash' is not cryptographic"),
        ({"hash_seed_digest": None}, "PYTHONHASHSEED"),
        ({"has_lora": True}, "LoRA"),
        (
            {"weights_elsewhere": "load_format = 'tensorizer'"},
            "load_format = 'tensorizer': kvtier does not see",
        ),
        ({"has_draft_model": True}, "speculative"),
    ],
)
def test_k1_what_could_mix_up_the_blocks_of_two_runs_needs_tiers_that_die_with_the_engine(change, says):
    facts = replace(PLAIN, **change)
    with pytest.raises(UnsupportedModelError, match=says) as raised:
        check_persistence(facts, {"memory": False, "disk": True})
    assert "'disk'" in str(raised.value)
    assert "'memory'" not in str(raised.value)
    check_persistence(facts, {"memory": False})


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
        {"num_workers": 2, "tensor_parallel": 2},
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


def test_c43_a_row_holds_the_parts_of_all_workers():
    two = make_namespace(replace(PLAIN, num_workers=2, tensor_parallel=2))
    assert two.groups[0].block_bytes == 2 * GROUP.block_bytes


def test_k12_o2_a_group_that_is_not_cached_is_left_out_and_the_others_keep_their_number():
    scratch_first = replace(PLAIN, groups=(replace(GROUP, group_id=1, window=64),))
    namespace = make_namespace(scratch_first)
    assert list(namespace.cached_groups) == [1]
    assert namespace.cached_groups[1].window == 64
