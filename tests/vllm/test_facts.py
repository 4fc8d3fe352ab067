from dataclasses import replace

import pytest

from kvtier_core import UnsupportedModelError
from kvtier_vllm.facts import EngineFacts, Workers, join, make_namespace
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
        {"backends": ("CPU_ATTN/vec",)},
        {"workers": Workers(count=2, tensor=2)},
        {"workers": Workers(count=1, tensor=1, pipeline=2)},
        {"workers": Workers(count=1, tensor=1, decode_context=2)},
        {"groups": (replace(GROUP, parts=(3072, 5120)),)},
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


@pytest.mark.parametrize(
    ("parts", "copies", "offsets", "size"),
    [
        ((8, 8), 1, (0, 8), 16),
        ((24, 16), 1, (0, 24), 40),
        ((0, 16, 8), 1, (0, 0, 16), 24),
        ((8, 8), 2, (0, 0), 8),
        ((8, 8, 24, 24), 2, (0, 0, 8, 8), 32),
    ],
)
def test_v11_c43_the_parts_of_all_workers_tile_a_row(parts, copies, offsets, size):
    group = replace(GROUP, parts=parts, copies=copies)
    assert tuple(group.offset(worker) for worker in range(len(parts))) == offsets
    spans = sorted(
        {(group.offset(worker), group.offset(worker) + part) for worker, part in enumerate(parts) if part}
    )
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == group.block_bytes == size
    assert make_namespace(replace(PLAIN, groups=(group,))).groups[0].block_bytes == size


def test_v11_the_same_bytes_in_other_parts_have_a_namespace_of_their_own():
    names = {
        make_namespace(replace(PLAIN, groups=(replace(GROUP, parts=parts),))).name
        for parts in ((2, 2, 2), (1, 2, 3), (3, 2, 1), (4, 2))
    }
    assert len(names) == 4


WINDOWED = replace(GROUP, group_id=1, window=64)
STAGES = Workers(count=2, tensor=1, pipeline=2)


def stage(*layers_of_groups):
    groups = [
        replace(
            group,
            layers=layers,
            kinds=("FullAttentionSpec",) * len(layers),
            parts=(4096 * len(layers),),
            window=group.window if layers else 1,
        )
        for group, layers in zip((GROUP, WINDOWED), layers_of_groups, strict=True)
    ]
    return replace(PLAIN, groups=tuple(groups), workers=STAGES)


def test_v11_stages_join_what_each_sees():
    joined = join([stage(("0", "1"), ("2",)), stage((), ("3", "4"))])
    full, windowed = joined.groups
    assert (full.layers, full.parts, full.window) == (("0", "1"), (8192, 0), None)
    assert (windowed.layers, windowed.parts, windowed.window) == (("2", "3", "4"), (4096, 8192), 64)
    assert len(windowed.kinds) == 3
    assert EngineFacts.from_bytes(joined.to_bytes()) == joined


def test_v11_workers_with_different_configurations_are_refused_by_number():
    other = replace(stage((), ("3",)), config_digest="other")
    with pytest.raises(
        UnsupportedModelError, match="worker 1 has other facts about the engine than worker 0"
    ):
        join([stage(("0",), ("2",)), other])


def test_c43_workers_of_one_stage_have_its_layers_once():
    both = replace(PLAIN, workers=Workers(count=2, tensor=2))
    joined = join([both, both])
    assert joined.groups[0].layers == GROUP.layers
    assert joined.groups[0].parts == (8192, 8192)


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
