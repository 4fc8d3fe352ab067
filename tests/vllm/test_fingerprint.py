"""What of vLLM's configuration tells engines apart (C02)."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from kvtier_vllm.fingerprint import config_digest
from tests.vllm.engines import BLOCK, QUIET, needs_vllm
from tests.vllm.models import LONGROPE, SIZES


class Mode(Enum):
    FAST = 1
    SLOW = 2


@dataclass
class CacheConfig:
    cache_dtype: str = "auto"
    num_gpu_blocks: int | None = None
    kv_cache_dtype_skip_layers: list[str] = field(default_factory=list)


@dataclass
class PassConfig:
    fuse_attn_quant: bool = False
    fuse_allreduce_rms: bool = False


@dataclass
class VllmConfig:
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    pass_config: PassConfig = field(default_factory=PassConfig)
    mode: Mode = Mode.FAST
    sizes: dict[str, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    instance_id: str = ""


def digest(environment=None, **options):
    return config_digest(VllmConfig(**options), environment or {})


@pytest.mark.parametrize(
    "change",
    [
        {"cache_config": CacheConfig(kv_cache_dtype_skip_layers=["0"])},
        {"cache_config": CacheConfig(cache_dtype="fp8")},
        {"pass_config": PassConfig(fuse_attn_quant=True)},
        {"mode": Mode.SLOW},
        {"sizes": {"a": {"b": [1]}}},
        {"names": {"a"}},
        {"environment": {"VLLM_HUMMING_ONLINE_QUANT_CONFIG": "{}"}},
    ],
    ids=repr,
)
def test_c02_a_setting_counts_unless_it_is_known_to_be_harmless(change):
    assert digest(**change) != digest()


@pytest.mark.parametrize(
    "change",
    [
        {"cache_config": CacheConfig(num_gpu_blocks=40)},
        {"pass_config": PassConfig(fuse_allreduce_rms=True)},
        {"instance_id": "another"},
        {
            "environment": {
                "VLLM_ENGINE_READY_TIMEOUT_S": 5,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": 5,
                "VLLM_DP_RANK": 1,
                "VLLM_ENABLE_V1_MULTIPROCESSING": True,
                "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
                "VLLM_ALLOW_INSECURE_SERIALIZATION": True,
            }
        },
    ],
    ids=repr,
)
def test_c02_room_names_ports_and_how_workers_add_up_do_not_count(change):
    assert digest(**change) == digest()


def test_c02_a_field_of_a_later_release_counts_by_itself():
    later = make_dataclass("VllmConfig", [("kv_rounding", str)], bases=(VllmConfig,), kw_only=True)
    assert config_digest(later(kv_rounding="up"), {}) != config_digest(later(kv_rounding="down"), {})


def test_c02_the_order_of_sets_and_tables_does_not_count():
    names = [f"layer{n}" for n in range(50)]
    assert digest(names=dict.fromkeys(names).keys()) == digest(names=dict.fromkeys(names[::-1]).keys())
    assert digest(sizes={"a": 1, "b": 2}) == digest(sizes={"b": 2, "a": 1})


def test_c02_a_value_that_cannot_be_told_from_others_makes_the_configuration_unknown(caplog):
    assert digest(sizes={"hook": object()}) is None
    assert "nothing tells the object in VllmConfig.sizes.hook from others" in caplog.text


PHI = {**SIZES, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **LONGROPE}
PLAIN = {"skip_tokenizer_init": True, "enforce_eager": True, "block_size": BLOCK, "max_model_len": 512}
DIFFERENT: dict[str, dict[str, Any]] = {
    "max_model_len": {"max_model_len": 1024},
    "layers whose KV is not quantized": {"kv_cache_dtype_skip_layers": ["0"]},
    "implementation of the model": {"model_impl": "transformers"},
    "rope": {"hf_overrides": {"rope_theta": 5e5}},
    "sliding window": {"disable_sliding_window": True},
    "dtype": {"dtype": "bfloat16"},
    "revision of the code": {"code_revision": "b" * 40},
    "attention backend": {"attention_config": {"use_non_causal": True}},
    "what the loader is told": {"model_loader_extra_config": {"enable_multithread_load": True}},
}
SAME: dict[str, dict[str, Any]] = {
    "room": {"num_gpu_blocks_override": 77, "gpu_memory_utilization": 0.5},
    "batches": {"max_num_seqs": 3, "max_num_batched_tokens": 1024},
    "name": {"served_model_name": "other"},
    "seen": {"disable_log_stats": True},
    "workers": {"tensor_parallel_size": 2},
    "proposals from the text": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    },
}


@needs_vllm
@pytest.mark.timeout(1800)
def test_c02_what_changes_kv_in_vllms_own_configuration_counts_and_what_does_not_does_not(tmp_path):
    here, there = tmp_path / "here" / "model", tmp_path / "there" / "model"
    here.mkdir(parents=True)
    (here / "config.json").write_text(json.dumps(PHI))
    shutil.copytree(here, there)
    plain = {**PLAIN, "model": str(here), "dtype": "float32"}
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "again": {},
        "elsewhere": {"model": str(there)},
        **DIFFERENT,
        **SAME,
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("config_digests.py"))],
        input="".join(json.dumps({**plain, **options}) + "\n" for options in cases.values()),
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    digests = dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))
    assert None not in digests.values(), done.stderr[-3000:]
    same = {name for name, value in digests.items() if value == digests["plain"]}
    assert same == {"plain", "again", "elsewhere", *SAME}
    assert len(set(digests.values())) == len(DIFFERENT) + 1
