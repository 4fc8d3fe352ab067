"""``kvtier certify`` on real vLLM as it is, and with a worker that misreads what it loads."""

import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.main import main
from kvtier_core import ConfigError, UnsupportedModelError
from kvtier_vllm.certify import open_engine
from tests.vllm.engines import BLOCK, QUIET, needs_vllm
from tests.vllm.models import save_tiny_model

pytestmark = [needs_vllm, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
GROUP = "kvtier.certify.v1"
OPTIONS = {"dtype": "float32", "block_size": BLOCK, "num_gpu_blocks_override": 40}
MISREADING = """
from kvtier_vllm import spec
from kvtier_vllm.certify import open_engine
from tests.vllm.misreading_spec import Misreading

spec.KvtierWorker = Misreading  # but not the self-test's, which would refuse it
"""


@pytest.fixture
def certify(site, model, monkeypatch, capsys):
    """Runs the command on the driver in a module; the exit status, the report, and its rows by scenario."""
    for name, value in {**QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        monkeypatch.setenv(name, value)

    def run(driver, *arguments, model=model):
        site.install("tiny-engine", {GROUP: {"tiny": "tiny_driver:open_engine"}}, {"tiny_driver": driver})
        monkeypatch.setenv("PYTHONPATH", ":".join([str(site.path), *filter(None, sys.path)]))
        status = main(
            [
                *("certify", "--engine", "tiny", "--model", str(model), "--tokens", "150", "--json"),
                *("--engine-options", json.dumps(OPTIONS), *arguments),
            ]
        )
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        return status, report, {row["scenario"]: row for row in report["rows"]}

    return run


def test_vllm_is_certified(certify):
    driver = "from kvtier_vllm.certify import open_engine\n"
    status, report, rows = certify(driver, "--only", "restart,reset,weights,stale")
    assert status == 0, report["why_not"]
    assert report["certified"]
    assert report["tokens_per_block"] == BLOCK
    assert {row["verdict"] for row in rows.values()} == {"pass"}
    assert rows["restart"]["restored"]["disk"] == 4 * BLOCK
    assert rows["stale"]["restored"].get("disk", 0) < 4 * BLOCK
    for name in ("reset", "weights"):
        assert not rows[name]["restored_tokens"]
        assert rows[f"{name} again"]["restored_tokens"] == rows["pool"]["restored_tokens"]


@pytest.mark.parametrize("parts", ["2", "4"], ids=["K and V", "two heads"])
def test_a_worker_that_misreads_one_layer_is_not_certified(certify, monkeypatch, parts):
    monkeypatch.setenv("PARTS", parts)
    status, report, rows = certify(MISREADING, "--only", "pool")
    assert status == 1
    assert not report["certified"]
    assert rows["empty tiers"]["verdict"] == "pass"
    assert rows["pool"]["verdict"] == "FAIL"
    assert rows["pool"]["why"].startswith(f"first wrong after {BLOCK} tokens, by ")


@pytest.mark.real_model
def test_smollm2_is_certified_in_every_scenario_that_it_has(certify, smollm2):
    status, report, rows = certify("from kvtier_vllm.certify import open_engine\n", model=smollm2)
    assert status == 0, report["why_not"]
    assert rows.pop("tp2")["why"] == "its 9 attention heads can't be shared by 2 workers"
    assert len(rows) == 14
    assert {row["verdict"] for row in rows.values()} == {"pass"}


@pytest.mark.real_model
@pytest.mark.parametrize("parts", ["2", "6"], ids=["K and V", "two heads"])
def test_smollm2_is_not_certified_where_one_layer_is_misread(certify, smollm2, monkeypatch, parts):
    monkeypatch.setenv("PARTS", parts)  # it has K and V of three heads
    status, report, rows = certify(MISREADING, "--only", "pool", model=smollm2)
    assert (status, report["certified"]) == (1, False)
    assert rows["pool"]["why"].startswith(f"first wrong after {BLOCK} tokens, by ")


@pytest.mark.parametrize("name", ["kv_transfer_config", "kvtier_config", "max_model_len"])
def test_options_that_certifying_sets_are_refused(model, name):
    with pytest.raises(ConfigError, match=f"{name} can't be set"):
        open_engine(SimpleNamespace(model=model, engine_options={name: "anything"}))


def test_a_file_is_refused(model):
    with pytest.raises(ConfigError, match="a directory that has a config.json"):
        open_engine(SimpleNamespace(model=model / "config.json", engine_options={}))


def test_other_rotary_positions_have_twice_the_base(model, tmp_path):
    from kvtier_vllm.certify.variants import change

    unchanged, options = change("rope", model, {"dtype": "float32"}, tmp_path)
    assert (unchanged, options["dtype"]) == (model, "float32")
    assert options["hf_overrides"]["rope_parameters"]["rope_theta"] == 2 * 10000.0


def test_other_weights_differ_in_one_matrix_of_a_copy(model, tmp_path):
    from safetensors.torch import load_file

    from kvtier_vllm.certify.variants import change

    copy, _ = change("weights", model, {}, tmp_path)
    before, after = (load_file(place / "model.safetensors") for place in (model, copy))
    changed = [name for name in before if not before[name].equal(after[name])]
    assert changed == ["model.layers.0.self_attn.k_proj.weight"]
    assert {path.name for path in copy.iterdir()} == {path.name for path in model.iterdir()}


def test_another_dtype_is_another_one(model, tmp_path):
    from kvtier_vllm.certify.variants import change

    assert change("dtype", model, {"dtype": "float32"}, tmp_path)[1]["dtype"] == "bfloat16"
    assert change("dtype", model, {}, tmp_path)[1]["dtype"] == "float32"


def test_a_second_kind_of_workers_is_refused(model, tmp_path):
    from kvtier_vllm.certify.variants import change

    assert change("tp2", model, {}, tmp_path)[1]["tensor_parallel_size"] == 2
    with pytest.raises(UnsupportedModelError, match="several workers already"):
        change("tp2", model, {"tensor_parallel_size": 2}, tmp_path)


def test_heads_that_two_workers_cannot_share_are_refused(tmp_path):
    from kvtier_vllm.certify.variants import change

    odd = save_tiny_model(tmp_path / "odd", hidden_size=72, num_attention_heads=9, num_key_value_heads=3)
    with pytest.raises(UnsupportedModelError, match="9 attention heads can't be shared by 2 workers"):
        change("tp2", odd, {}, tmp_path)


def test_the_distribution_offers_the_driver():
    project = tomllib.loads((ROOT / "plugins/kvtier-vllm/pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == {"vllm": f"{open_engine.__module__}:{open_engine.__name__}"}
