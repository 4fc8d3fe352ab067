"""What of an SGLang engine makes its pages others, and what is refused by name."""

import re
from dataclasses import replace
from typing import Any

import pytest

from kvtier_core import ConfigError, UnsupportedModelError
from kvtier_core.engine import GroupSpec
from kvtier_sglang.changes import WeightChanges
from kvtier_sglang.facts import EngineFacts, check_engine, make_namespace, why_weights_are_unknown
from kvtier_sglang.options import load_options

ARGUMENTS = {
    "model_path": "/models/one",
    "load_format": "auto",
    "dtype": "float32",
    "kv_cache_dtype": "auto",
    "json_model_override_args": "{}",
    "attention_backend": "torch_native",
    "tp_size": 1,
    "random_seed": 17,
    "nccl_port": 4000,
    "max_running_requests": 8,
    "disaggregation_mode": "null",
    "cuda_graph_config": {"decode": {"backend": "disabled"}},
}
GROUPS = {
    "model_path": "model",
    "load_format": "model",
    "dtype": "model",
    "kv_cache_dtype": "model",
    "json_model_override_args": "model",
    "attention_backend": "exec.kernels",
    "tp_size": "parallel",
    "random_seed": "device",
    "nccl_port": "parallel",
    "max_running_requests": "schedule",
    "disaggregation_mode": "disagg",
    "cuda_graph_config": "exec.graph",
}
FULL = GroupSpec(layers=("2 of full attention",), block_bytes=4096)
FACTS = EngineFacts(
    model="one",
    weights_digest="w",
    arguments=ARGUMENTS,
    groups=GROUPS,
    environment={},
    parts=("sglang 0.5.23", "torch 2.13"),
    kv_pool="MHATokenToKVPool",
    pools=("MHATokenToKVPool",),
    kv_layout="nhd",
    kv_dtype="float32",
    device="cpu",
    is_multimodal=False,
    is_quantized_kv=False,
    has_request_windows=False,
    side_states=(),
    rank=0,
    num_ranks=1,
    tokens_per_page=16,
    kv_parts=(FULL,),
)
WINDOWED = replace(
    FACTS,
    kv_pool="SWAKVPool",
    pools=("MHATokenToKVPool", "MHATokenToKVPool"),
    kv_parts=(FULL, GroupSpec(layers=("2 of a window of 64 tokens",), block_bytes=4096, window=64)),
)
"""An engine with sliding windows beside full attention."""
STATEFUL = replace(
    FACTS,
    kv_pool="HybridLinearKVPool",
    pools=("MHATokenToKVPool", "MambaPool"),
    kv_parts=(
        FULL,
        GroupSpec(layers=("2 with a state of (64, 2) torch.float32",), block_bytes=1024, window=1),
    ),
)
"""An engine with states beside full attention."""


def _with(**arguments: object) -> EngineFacts:
    return replace(FACTS, arguments={**ARGUMENTS, **arguments})


@pytest.mark.parametrize(
    "other",
    [
        replace(FACTS, weights_digest="v"),
        replace(FACTS, parts=("sglang 0.5.23", "torch 2.14")),
        replace(FACTS, kv_dtype="bfloat16"),
        replace(FACTS, tokens_per_page=32),
        replace(FACTS, kv_parts=(replace(FULL, block_bytes=8192),)),
        replace(FACTS, num_ranks=2),
        replace(FACTS, rank=1),
        replace(FACTS, environment={"SGLANG_USE_AITER": "1"}),
        _with(attention_backend="triton"),
        _with(json_model_override_args='{"rope_theta": 1000}'),
        _with(an_argument_of_a_later_release=True),
        _with(cuda_graph_config={"decode": {"backend": "full"}}),
    ],
)
def test_c02_what_changes_kv_changes_the_namespace(other):
    assert make_namespace(other).name != make_namespace(FACTS).name


@pytest.mark.parametrize(
    "same",
    [
        _with(random_seed=18, nccl_port=4001),
        _with(model_path="/elsewhere/one", max_running_requests=16),
        replace(FACTS, environment={"SGLANG_LOG_MS": "1", "SGLANG_RUN_ID": "a random one"}),
    ],
)
def test_what_can_not_change_kv_leaves_the_namespace_as_it_is(same):
    assert make_namespace(same).name == make_namespace(FACTS).name


def _change(facts: EngineFacts, **change: Any) -> EngineFacts:
    """*facts* with another last part."""
    *others, last = facts.kv_parts
    return replace(facts, kv_parts=(*others, replace(last, **change)))


@pytest.mark.parametrize(
    ("facts", "other"),
    [
        (FACTS, replace(FACTS, kv_parts=WINDOWED.kv_parts)),
        (WINDOWED, _change(WINDOWED, window=128)),
        (WINDOWED, _change(WINDOWED, layers=("1 of a window of 64 tokens",))),
        (STATEFUL, _change(STATEFUL, layers=("2 with a state of (32, 4) torch.float32",))),
        (STATEFUL, _change(STATEFUL, layers=("2 with a state of (64, 2) torch.bfloat16",))),
    ],
)
def test_c02_windows_and_states_are_told_apart(facts, other):
    assert make_namespace(facts).name != make_namespace(other).name


def test_c02_unknown_weights_are_reused_by_no_other_run():
    unknown = replace(FACTS, weights_digest=None)
    assert make_namespace(unknown).name != make_namespace(unknown).name


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("load_format", "dummy"),
        ("load_format", "remote"),
        ("trust_remote_code", True),
        ("model_loader_extra_config", '{"presharded_path": "/x"}'),
        ("custom_weight_loader", ["module.load"]),
        ("weight_cache_mode", "client"),
        ("forward_hooks", [{"name": "x"}]),
        ("delete_ckpt_after_loading", True),
    ],
)
def test_c02_weights_from_elsewhere_are_unknown(argument, value):
    assert why_weights_are_unknown(ARGUMENTS) is None
    assert argument in (why_weights_are_unknown({**ARGUMENTS, argument: value}) or "")


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        (replace(WINDOWED, has_request_windows=True), "windows by request"),
        (replace(STATEFUL, side_states=("ngram_pool",)), "ngram_pool"),
        (replace(STATEFUL, pools=("MLATokenToKVPool", "MambaPool")), "MLATokenToKVPool and MambaPool"),
        (_with(enable_linear_replayssm=True), "ReplaySSM"),
        (_with(enable_unified_memory=True), "unified memory"),
        (replace(FACTS, is_multimodal=True), "images"),
        (replace(FACTS, kv_pool="MLATokenToKVPool"), "MLATokenToKVPool"),
        (replace(FACTS, kv_layout="hnd"), "'hnd'"),
        (replace(FACTS, is_quantized_kv=True), "scales"),
        (replace(FACTS, device="cuda"), "cuda"),
        (_with(pp_size=2), "pp_size = 2"),
        (_with(dp_size=2), "dp_size = 2"),
        (_with(enable_lora=True), "LoRA"),
        (_with(speculative_algorithm="EAGLE"), "speculative"),
        (_with(disaggregation_mode="prefill"), "disaggregation_mode"),
    ],
)
def test_what_was_not_tried_is_refused_by_name(facts, named):
    for served in (FACTS, WINDOWED, STATEFUL):
        check_engine(served)
    with pytest.raises(UnsupportedModelError, match=re.escape(named)):
        check_engine(facts)


def test_c02_an_argument_that_nothing_tells_from_others_is_refused():
    with pytest.raises(TypeError, match="attention_backend"):
        make_namespace(_with(attention_backend=object()))


def test_options_that_are_not_known_are_named(tmp_path):
    file = tmp_path / "kvtier.toml"
    file.write_text('[pool]\ncapacity = "1MiB"\n')
    settings = load_options({"kvtier_config": str(file), "kvtier": {"pool": {"capacity": "2MiB"}}})
    assert settings.pool.capacity == 2 << 20
    for options, named in (
        ({"kvtier_confg": "x"}, "kvtier_confg"),
        ({"kvtier_config": "relative.toml"}, "absolute"),
        ({"kvtier": "x"}, "table"),
    ):
        with pytest.raises(ConfigError, match=named):
            load_options(options)


def test_changes_of_weights_are_counted_whatever_they_are_called_with():
    changes = WeightChanges()
    changes.note("self", "request", key="word")
    changes.note()
    assert changes.count == 2
