"""What is unsafe is refused when vLLM starts, by name: the list, vLLM's own configurations, and real engines."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvtier_vllm
from kvtier_core import UnsupportedModelError
from kvtier_vllm.facts import Workers
from kvtier_vllm.refusals import (
    KV,
    LASTING,
    RESET,
    VLLMS_ROWS,
    WORKERS,
    check_engine,
    check_persistence,
    check_reset,
    check_workers,
)
from tests.vllm.engines import BLOCK, QUIET, EngineError, connector, disk, needs_vllm
from tests.vllm.facts_of import GROUP, PLAIN
from tests.vllm.test_bridge import ROOT, tiering

README = Path(kvtier_vllm.__file__).parents[2] / "README.md"
ONE = PLAIN.workers
BEHIND = replace(GROUP, group_id=1, layers=("draft_model.layers.0", "draft_model.layers.1"), window=64)


def test_a_plain_engine_is_served():
    check_engine(PLAIN)
    check_persistence(PLAIN, ["disk"])
    check_workers("toy", ONE)
    check_reset(PLAIN, keeps_tiers=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"groups": (replace(GROUP, kinds=("FullAttentionSpec", "CrossAttentionSpec")),)},
            "'layers.1' keeps CrossAttentionSpec, a layout kvtier does not know",
        ),
        (
            {
                "groups": (replace(GROUP, kinds=("FullAttentionSpec", "MambaSpec")),),
                "has_prefix_caching": False,
            },
            "'layers.1' keeps MambaSpec, and vLLM's prefix caching is off",
        ),
        ({"groups": (replace(GROUP, window=64),), "blocks_per_chunk": 2}, "sliding windows"),
        (
            {"groups": (replace(GROUP, uncertain="layers.1"),), "canonical_layout": True},
            "canonical_layout with its layer 'layers.1'",
        ),
        (
            {"strange_speculation": "method = 'custom_class'"},
            "speculative_config has method = 'custom_class'",
        ),
        (
            {"groups": (GROUP, BEHIND), "layers_by_first_table": "draft_model."},
            "layer 'draft_model.layers.0' over the model's own KV",
        ),
    ],
)
def test_c43_what_is_unsafe_is_refused_by_name(change, says):
    with pytest.raises(UnsupportedModelError, match=says) as raised:
        check_engine(replace(PLAIN, **change))
    assert "'toy'" in str(raised.value)


@pytest.mark.parametrize(
    ("workers", "says"),
    [
        (Workers(count=2, tensor=1, prefill_context=2), "prefill_context_parallel_size = 2"),
        (Workers(count=2, tensor=1), "counts 2 workers where one engine has 1"),
        (Workers(count=2, tensor=2, hosts=2), "on 2 hosts"),
        (Workers(count=2, tensor=2, unseen=1), "1 of its 2 workers do not have vLLM's shared memory"),
    ],
)
def test_v11_v12_rows_that_workers_would_not_fill_alike_are_refused_to_spec_and_bridge(workers, says):
    with pytest.raises(UnsupportedModelError, match=says):
        check_engine(replace(PLAIN, workers=workers))
    with pytest.raises(UnsupportedModelError, match=says):
        check_workers("toy", workers)


@pytest.mark.parametrize(
    ("groups", "prefix"),
    [
        ((GROUP, BEHIND), None),
        ((GROUP, replace(BEHIND, layers=("layers.2",))), "draft_model."),
        ((replace(BEHIND, group_id=0), replace(GROUP, group_id=1)), "draft_model."),
    ],
    ids=["each layer by its own group's table", "windows of the model", "in the first group"],
)
def test_v8_a_draft_model_that_vllm_writes_where_it_belongs_is_served(groups, prefix):
    check_engine(replace(PLAIN, groups=groups, layers_by_first_table=prefix))


def test_v11_rows_that_vllm_lays_out_wrong_are_refused_to_the_bridge_alone():
    workers = Workers(count=2, tensor=1, pipeline=2)
    check_engine(replace(PLAIN, workers=workers))
    with pytest.raises(UnsupportedModelError, match="pipeline_parallel_size = 2.*use KvtierSpec"):
        check_workers("toy", workers)


def test_every_reason_is_told_at_once():
    with pytest.raises(UnsupportedModelError) as raised:
        check_engine(
            replace(PLAIN, workers=replace(ONE, hosts=2), groups=(replace(GROUP, uncertain="layers.1"),))
        )
    assert "2 hosts" in str(raised.value)
    assert "canonical_layout" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hash_algorithm": "xxhash"}, "'xxhash' is not cryptographic"),
        (
            {"weights_elsewhere": "load_format = 'tensorizer'"},
            "load_format = 'tensorizer': kvtier does not see",
        ),
    ],
)
def test_k1_what_could_mix_up_the_blocks_of_two_runs_needs_tiers_that_die_with_the_engine(change, says):
    facts = replace(PLAIN, **change)
    with pytest.raises(UnsupportedModelError, match=says) as raised:
        check_persistence(facts, ["disk"])
    assert "'disk'" in str(raised.value)
    check_persistence(facts, [])


def test_v4_tiers_that_a_reset_keeps_need_weights_whose_changes_are_seen():
    facts = replace(PLAIN, silent_weights="weight_transfer_config with backend = 'sharded_rdt'")
    with pytest.raises(
        UnsupportedModelError, match="on_reset = \"pool\" with weight_transfer_config.*'sharded_rdt'"
    ):
        check_reset(facts, keeps_tiers=True)
    check_reset(facts, keeps_tiers=False)


def test_v16_what_the_operator_says_stands_for_weights_that_kvtier_does_not_see():
    elsewhere = replace(PLAIN, weights_digest=None, weights_elsewhere="load_format = 'tensorizer'")
    with pytest.raises(UnsupportedModelError, match="set kvtier_identity to a text"):
        check_persistence(elsewhere, ["disk"])
    check_persistence(replace(elsewhere, identity="mine at 8f3c"), ["disk"])


def test_v12_the_readme_lists_what_the_code_refuses_and_to_whom():
    rows = re.findall(r"^\| (.+?) \| .+ \| (yes|no|there alone|) *\|$", README.read_text(), re.MULTILINE)
    always = [(what, "yes") for what in WORKERS]
    always += [(what, "there alone") for what in VLLMS_ROWS]
    always += [(what, "no") for what in KV]
    assert [row for row in rows if row[1]] == always
    lasting = re.search(r"With tiers that outlive.*?\n\n(.*?)\n\n", README.read_text(), re.DOTALL)
    assert lasting is not None
    assert re.findall(r"^\| (?!refused|---)(.+?) \|", lasting[1], re.MULTILINE) == [*LASTING, *RESET]


class Case(NamedTuple):
    """What makes vLLM's own configuration one that is refused, and to whom it is."""

    says: str
    asked: dict[str, Any]
    to: tuple[str, ...]


BOTH, BRIDGE, SPEC = ("engine", "bridge"), ("bridge",), ("engine",)
KEPT, KEPT_AT_RESET = ("lasting",), ("reset",)
GQA = {"hf_overrides": {"num_key_value_heads": 1}}  # as vLLM wants it for decode context parallelism
LAUNCHER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
CASES = {
    "prefill context parallelism": Case(
        "prefill_context_parallel_size = 2",
        {"parallel": {"prefill_context_parallel_size": 2}},
        BOTH,
    ),
    "workers of several engines that count as one's (an external launcher with data parallelism)": Case(
        "counts 2 workers where one engine has 1",
        {
            "engine": {"distributed_executor_backend": "external_launcher", "data_parallel_size": 2},
            "environment": LAUNCHER,
        },
        BOTH,
    ),
    "workers of one engine on several hosts": Case(
        "hosts?: they must share one host's memory",
        {"engine": {"tensor_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "mp"}},
        BOTH,
    ),
    "pipeline parallelism": Case(
        "pipeline_parallel_size = 2", {"engine": {"pipeline_parallel_size": 2}}, BRIDGE
    ),
    "layers that keep neither full, sliding-window or latent attention nor a state": Case(
        "'layer.0' keeps ChunkedLocalAttentionSpec", {"groups": [["chunks", BLOCK]]}, SPEC
    ),
    "latent attention and states without vLLM's prefix caching": Case(
        "'layer.0' keeps MambaSpec, and vLLM's prefix caching is off",
        {"groups": [["state", BLOCK]], "engine": {"enable_prefix_caching": False}},
        SPEC,
    ),
    "sliding windows in blocks joined into larger ones": Case(
        "blocks_per_chunk = 2 with sliding windows",
        {"groups": [["window", BLOCK]], "connector": {"blocks_per_chunk": 2}},
        SPEC,
    ),
    "layers that vLLM's canonical layout leaves uncertain": Case(
        "canonical_layout with its layer 'layer.0'",
        {"groups": [["state", BLOCK]], "connector": {"canonical_layout": True}},
        SPEC,
    ),
    "speculative decoding that is not lossless, or by code that kvtier does not know": Case(
        "speculative_config has rejection_sample_method = 'synthetic'",
        {
            "engine": {
                "speculative_config": {
                    "method": "draft_model",
                    "num_speculative_tokens": 2,
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_rates": [0.5, 0.25],
                }
            }
        },
        SPEC,
    ),
    "a draft model whose layers are not in the model's first KV group": Case(
        "layer 'draft_model.1' over the model's own KV",
        {
            "groups": [["full", BLOCK], ["window", BLOCK, "draft_model"]],
            "engine": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
        },
        SPEC,
    ),
    "a prefix hash that is not cryptographic": Case(
        "'xxhash' is not cryptographic", {"engine": {"prefix_caching_hash_algo": "xxhash"}}, KEPT
    ),
    "weights from elsewhere than the model's own files": Case(
        "load_format = 'tensorizer'", {"engine": {"load_format": "tensorizer"}}, KEPT
    ),
    "weights that may change without a call that kvtier sees": Case(
        "weight_transfer_config with backend = 'sharded_rdt'",
        {"engine": {"weight_transfer_config": {"backend": "sharded_rdt"}}},
        KEPT_AT_RESET,
    ),
}
PROPOSE = {"num_speculative_tokens": 3, "model": None}
SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "v8 ngram": {"engine": {"speculative_config": {"method": "ngram", "prompt_lookup_max": 4, **PROPOSE}}},
    "v8 draft model": {
        "engine": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}}
    },
    "v8 LoRA": {"engine": {"enable_lora": True}},
    "v4 weights that arrive within a call": {"engine": {"weight_transfer_config": {"backend": "nccl"}}},
    "v8 suffix": {"engine": {"speculative_config": {"method": "suffix", **PROPOSE}}},
    "v16 a streamer of the model's own files": {"engine": {"load_format": "runai_streamer"}},
    "i17 blocks of different sizes": {"groups": [["full", BLOCK], ["window", 2 * BLOCK]]},
    "i17 states beside latent attention": {"groups": [["latent", BLOCK], ["state", BLOCK]]},
    "v14 each engine on a host of its own": {
        "engine": {
            "nnodes": 2,
            "data_parallel_size": 2,
            "data_parallel_size_local": 1,
            "distributed_executor_backend": "mp",
        }
    },
}


def test_v12_every_refusal_has_a_case_of_vllms_own_configuration():
    assert list(CASES) == [*WORKERS, *VLLMS_ROWS, *KV, *LASTING, *RESET]


def ask(model: Path, asked: dict[str, Any]) -> dict[str, str]:
    """What kvtier says to the configuration that vLLM makes of this."""
    engine = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK,
        "max_model_len": 512,
        **asked.get("engine", {}),
    }
    if "speculative_config" in engine:
        engine["speculative_config"] = {"model": str(model), **engine["speculative_config"]}
    question = {key: value for key, value in asked.items() if key != "environment"} | {"engine": engine}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("config_refusals.py"))],
        input=json.dumps(question),
        env={**os.environ, **QUIET, **asked.get("environment", {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


@needs_vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", CASES)
def test_v11_v12_vllms_own_configuration_is_refused(model, what):
    case = CASES[what]
    said = ask(model, case.asked)
    assert {who for who, reason in said.items() if reason} == set(case.to)
    for who in case.to:
        assert re.search(case.says, said[who])


@needs_vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", SERVED)
def test_v8_v14_v16_vllms_own_configuration_is_served(model, what, tmp_path):
    package = tmp_path / "arctic_inference"  # vLLM wants to see it for suffixes
    package.mkdir()
    package.joinpath("__init__.py").touch()
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    said = ask(model, {"environment": {"PYTHONPATH": search}, **SERVED[what]})
    assert set(said.values()) == {""}


@needs_vllm
@pytest.mark.timeout(600)
def test_v12_decode_context_parallelism_is_served(model):
    said = ask(
        model,
        {"engine": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, **GQA}},
    )
    assert said["engine"] == said["lasting"] == said["reset"] == ""
    assert "2 of its 2 workers do not have vLLM's shared memory" in said["bridge"]  # here are none
    assert "decode_context" not in said["bridge"]


def refusal(start, *arguments, **options):
    with pytest.raises(EngineError) as raised:
        start(*arguments, **options)
    return str(raised.value)


@needs_vllm
@pytest.mark.timeout(1800)
def test_k9_o3_an_unknown_option_ends_the_start_with_the_allowed_names(start, tmp_path):
    said = refusal(start, connector(disk(tmp_path), cpu_bytes_to_use=1))
    assert "kvtier knows no 'cpu_bytes_to_use'" in said
    assert "kvtier_config" in said


@needs_vllm
@pytest.mark.timeout(1800)
def test_k1_o3_a_hash_that_is_not_cryptographic_is_refused_with_a_disk(start, tmp_path):
    said = refusal(start, connector(disk(tmp_path)), prefix_caching_hash_algo="xxhash")
    assert "'xxhash' is not cryptographic" in said
    assert "tier 'disk'" in said


@needs_vllm
@pytest.mark.timeout(1800)
def test_k12_windows_in_larger_blocks_are_refused(start, tmp_path, hybrid_model):
    said = refusal(
        start, connector(disk(tmp_path), blocks_per_chunk=2), model=hybrid_model, num_gpu_blocks_override=100
    )
    assert "blocks_per_chunk = 2 with sliding windows" in said


@needs_vllm
@pytest.mark.timeout(1800)
def test_v11_pipeline_stages_are_refused_to_the_bridge_in_a_real_engine(start, tmp_path):
    said = refusal(
        start,
        tiering(tmp_path, kvtier_identity="tiny"),
        processes=4,
        environment={"PYTHONPATH": str(ROOT)},
        pipeline_parallel_size=2,
    )
    assert "pipeline_parallel_size = 2: each stage keeps layers of its own" in said
    assert "shared memory" not in said  # both stages are here
