"""Namespaces (C02, K1): only interchangeable bytes share one."""

import dataclasses
import re
from typing import Any

import pytest

from kvtier_core.namespace import GroupSpec, Namespace, payload_sizes
from kvtier_core.proof import row_bytes_for
from kvtier_core.runtime import plan_geometry
from kvtier_core.settings import PoolSettings, Settings


def namespace(**changes: Any) -> Namespace:
    """A namespace whose every field is known, but for *changes*."""
    base = Namespace(
        model="Org/Model-7B",
        kv_dtype="float16",
        tokens_per_block=16,
        groups=(GroupSpec(layers=("0", "1"), block_bytes=4096),),
        layout="kv-first",
        revision="a",
        weights_digest="d1",
    )
    return dataclasses.replace(base, **changes)


def test_c02_the_same_declaration_gives_the_same_name():
    assert namespace().name == namespace().name


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "Org/Model-8B"},
        {"model": "org/model-7b"},
        {"kv_dtype": "bfloat16"},
        {"tokens_per_block": 32},
        {"groups": (GroupSpec(layers=("0",), block_bytes=4096),)},
        {"groups": (GroupSpec(layers=("0", "1"), block_bytes=8192),)},
        {"groups": (GroupSpec(layers=("0",), block_bytes=4096), GroupSpec(layers=("1",), block_bytes=4096))},
        {"layout": "v-first"},
        {"revision": "b"},
        {"weights_digest": "d2"},
        {"block_size_factor": 2},
        {"parallel": (("tp_size", 2), ("tp_rank", 0))},
        {"parallel": (("tp_size", 2), ("tp_rank", 1))},
        {"hash_algorithm": "another"},
        {"format_version": 2},
        {"epoch": "e1"},
    ],
    ids="-".join,
)
def test_c02_whatever_changes_the_bytes_changes_the_name(changes):
    assert namespace(**changes).name != namespace().name


def test_c02_every_field_is_covered_by_the_test_above():
    fields = {field.name for field in dataclasses.fields(Namespace)}
    cases = test_c02_whatever_changes_the_bytes_changes_the_name.pytestmark[0].args[1]
    assert {name for changes in cases for name in changes} == fields


@pytest.mark.parametrize("dtype", ["auto", ""])
def test_k1_o1_an_unresolved_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="resolved"):
        namespace(kv_dtype=dtype)


def test_k1_o1_engines_of_different_dtype_are_apart_and_of_equal_dtype_together():
    assert namespace(kv_dtype="float16").name != namespace(kv_dtype="bfloat16").name
    assert namespace(kv_dtype="float16").name == namespace(kv_dtype="float16").name


def test_k1_o2_unknown_weights_are_never_reused():
    one, two = namespace(weights_digest=None), namespace(weights_digest=None)
    assert one.name != two.name
    assert one.name == dataclasses.replace(one).name


@pytest.mark.parametrize("model", ["Org/Model-7B", "/data/models/ünï", "...", "", "x" * 300, "../../etc"])
def test_c02_a_name_is_safe_as_a_directory(model):
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?-[0-9a-f]{32}", namespace(model=model).name)
    assert len(namespace(model=model).name) <= 80


def test_c34_every_epoch_is_new():
    names = {namespace().name}
    current = namespace()
    for _ in range(100):
        current = current.next_epoch()
        names.add(current.name)
    assert len(names) == 101
    assert namespace().next_epoch().name != namespace().next_epoch().name


def test_c02_the_description_is_readable():
    description = namespace().describe()
    assert description["model"] == "Org/Model-7B"
    assert description["groups"][0]["block_bytes"] == 4096


def test_payload_sizes_are_by_group():
    groups = [GroupSpec(layers=("0",), block_bytes=10), GroupSpec(layers=("1",), block_bytes=20)]
    assert payload_sizes(groups) == (10, 20)


def test_c02_a_groups_own_block_size_and_window_are_part_of_the_name_and_defaults_are_not():
    plain = namespace()
    [group] = plain.groups
    assert plain.name == "org-model-7b-a4b0aed1a25bb8d60faf964da80be416", (
        "the name it had before these fields"
    )
    for changed in (dataclasses.replace(group, tokens_per_block=32), dataclasses.replace(group, window=128)):
        assert dataclasses.replace(plain, groups=(changed,)).name != plain.name


def test_k12_o2_only_cached_groups_must_be_multiples_of_a_hash_and_have_rows():
    scratch = GroupSpec(layers=("s",), block_bytes=64, tokens_per_block=4, cacheable=False)
    base = namespace(tokens_per_block=64)
    wide = dataclasses.replace(base.groups[0], tokens_per_block=3584)
    groups = (wide, scratch, base.groups[0])
    mixed = dataclasses.replace(base, groups=groups)
    assert list(mixed.cached_groups) == [0, 2]
    assert [mixed.tokens_of(group) for group in mixed.cached_groups.values()] == [3584, 64]
    settings = Settings(pool=PoolSettings(capacity=1 << 30), tiers={}, tier_types={})
    assert plan_geometry(settings, mixed).row_bytes == row_bytes_for(wide.block_bytes)
    with pytest.raises(ValueError, match="layer 's' has blocks of 4 tokens, which is no multiple of"):
        dataclasses.replace(base, groups=(dataclasses.replace(scratch, cacheable=True),))
    with pytest.raises(ValueError, match="no KV group takes part"):
        dataclasses.replace(base, groups=(scratch,))
    with pytest.raises(ValueError, match="window of -1"):
        dataclasses.replace(base, groups=(dataclasses.replace(wide, window=-1),))
