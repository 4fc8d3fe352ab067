"""``kvtier certify`` on transformers' engine as it is, and on one whose adapter misreads what it loads."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kvtier.main import main
from kvtier_core import UnsupportedModelError
from kvtier_transformers.certify import open_engine
from kvtier_transformers.certify.variants import change
from kvtier_transformers.models import find_smollm2
from tests.transformers.misreading import MISREADINGS
from tests.transformers.tiny import BLOCK, save_model, tiny_model, tokens, write_settings

ROOT = Path(__file__).parents[2]
GROUP = "kvtier.certify.v1"
RESTORABLE = sum((cut - 1) // BLOCK * BLOCK for cut in (15, 16, 17, 31, 32, 33, 79, 80, 81, 82, 85))
MISREADING = """
from kvtier_transformers.certify import open_engine
from tests.transformers.misreading import misread

misread({how!r}).start()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tiny_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture
def certify(site, model, tmp_path, monkeypatch, capsys):
    """Runs the command on the driver in a module; the exit status and the rows by scenario."""

    def run(driver, *arguments, model=model, pool="4MiB"):
        site.install("tiny-engine", {GROUP: {"tiny": "tiny_driver:open_engine"}}, {"tiny_driver": driver})
        monkeypatch.setenv("PYTHONPATH", ":".join([str(site.path), *filter(None, sys.path)]))
        status = main(
            [
                *("certify", "--engine", "tiny", "--model", str(model), "--tokens", "90", "--json"),
                *("--config", str(write_settings(tmp_path, capacity=pool)), *arguments),
            ]
        )
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        return status, report, {row["scenario"]: row for row in report["rows"]}

    return run


@pytest.mark.timeout(600)
def test_c06_each_lasting_tier_restores_by_itself(certify, tmp_path):
    config = tmp_path / "tiers.toml"
    config.write_text(
        'lookup_order = ["ram", "disk", "cold"]\n'
        + write_settings(tmp_path).read_text()
        + '[tiers.ram]\ntype = "memory"\ncapacity = "1MiB"\n'
        + f'[tiers.cold]\ntype = "disk"\nlayout = "files"\nroot = "{tmp_path}/cold"\n'
    )
    driver = "from kvtier_transformers.certify import open_engine\n"
    status, report, rows = certify(driver, "--config", str(config), "--only", "restart")
    assert status == 0, report["why_not"]
    assert list(rows) == ["empty tiers", "pool", "restart from disk", "restart from cold"]
    for tier in ("disk", "cold"):
        restored = rows[f"restart from {tier}"]["restored"]
        assert restored[tier] == 80
        assert set(restored) <= {tier, "pool"}


@pytest.mark.timeout(600)
def test_the_engine_is_certified_and_the_configured_tier_is_left_alone(certify, tmp_path):
    status, report, rows = certify("from kvtier_transformers.certify import open_engine\n")
    assert status == 0, report["why_not"]
    assert report["certified"]
    assert report["dtype"] == "float32"
    assert report["tolerance"] == 1e-3
    skipped = {"reset", "tp2"}
    assert {name for name, row in rows.items() if row["verdict"] == "skipped"} == skipped
    assert {name for name, row in rows.items() if row["verdict"] == "FAIL"} == set()
    for name in ("pool", "rope again", "dtype again", "weights again"):
        assert rows[name]["restored_tokens"] == RESTORABLE
    assert rows["restart"]["restored"]["disk"] == 80
    for name in ("empty tiers", "rope", "dtype", "weights"):
        assert not rows[name]["restored_tokens"]
    for name in ("swapped", "stale"):
        assert rows[name]["restored"].get("disk", 0) < 80  # what comes before the damage
    assert not (tmp_path / "blocks").exists()


@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_smollm2_is_certified_in_every_scenario_that_it_has(certify, scenarios):
    driver = "from kvtier_transformers.certify import open_engine\n"
    status, report, rows = certify(driver, *scenarios, model=find_smollm2(), pool="64MiB")
    assert status == 0, report["why_not"]
    if not scenarios:
        assert [rows.pop(name)["verdict"] for name in ("reset", "tp2")] == ["skipped", "skipped"]
        assert len(rows) == 12
    assert {row["verdict"] for row in rows.values()} == {"pass"}
    assert rows["restart"]["restored"]["disk"] == 80


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", MISREADINGS)
def test_an_adapter_that_misreads_one_layer_is_not_certified(certify, how):
    status, report, rows = certify(MISREADING.format(how=how), "--only", "restart")
    assert status == 1
    assert not report["certified"]
    assert rows["empty tiers"]["verdict"] == "pass"
    for name in ("pool", "restart"):
        assert rows[name]["verdict"] == "FAIL"
        assert rows[name]["why"].startswith("first wrong after 17 tokens, by ")
        assert "16 from pool restored" in rows[name]["why"]
    assert rows["restart"]["restored"]["disk"] == 80


@pytest.mark.real_model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", MISREADINGS)
def test_smollm2_is_not_certified_where_one_layer_is_misread(certify, how):
    driver = MISREADING.format(how=how)
    status, report, rows = certify(driver, "--only", "pool", model=find_smollm2(), pool="64MiB")
    assert (status, report["certified"]) == (1, False)
    assert rows["pool"]["why"].startswith("first wrong after 17 tokens, by ")


@pytest.mark.timeout(300)
def test_an_adapter_that_loads_nothing_is_not_certified(certify):
    driver = """
from kvtier_transformers.certify import open_engine
from kvtier_transformers.sequences import Running

Running._load = lambda *_: 0
"""
    status, _, rows = certify(driver, "--only", "pool")
    assert status == 1
    assert rows["pool"]["why"] == "not certified: nothing was restored"


@pytest.mark.timeout(300)
def test_fr1_a_restart_that_finds_nothing_in_the_tiers_is_not_certified(certify, monkeypatch):
    monkeypatch.setenv("KVTIER_TIERS__DISK__MIN_FREE", "1000TiB")
    status, _, rows = certify("from kvtier_transformers.certify import open_engine\n", "--only", "restart")
    assert status == 1
    assert rows["pool"]["verdict"] == "pass"
    assert rows["restart"]["why"].startswith("not certified: nothing was restored; the engine's log ends:")
    assert "nothing can be stored: no room" in rows["restart"]["why"]


@pytest.mark.timeout(300)
def test_fr2_a_tier_that_takes_no_blocks_or_few_is_certified_on_storage_of_its_own(certify, monkeypatch):
    monkeypatch.setenv("KVTIER_TIERS__DISK__READ_ONLY", "true")
    monkeypatch.setenv("KVTIER_TIERS__DISK__STORE_THRESHOLD", "2")
    monkeypatch.setenv("KVTIER_POOL__STORE_THRESHOLD", "3")
    status, report, rows = certify(
        "from kvtier_transformers.certify import open_engine\n", "--only", "restart"
    )
    assert status == 0, report["why_not"]
    assert rows["restart"]["restored"]["disk"] == 80


@pytest.mark.timeout(300)
def test_a_namespace_that_lacks_what_changed_is_not_certified(certify):
    driver = """
from kvtier_transformers import namespace
from kvtier_transformers.certify import open_engine

namespace._weights_digest = lambda *_, **__: "always the same"
"""
    status, _, rows = certify(driver, "--only", "rope,weights")
    assert status == 1
    for name in ("rope", "weights"):
        assert rows[name]["verdict"] == "FAIL"
        assert "restored" in rows[name]["why"]


@pytest.mark.parametrize("what", ["rope", "dtype", "weights"])
def test_a_changed_model_answers_otherwise(what):
    model = tiny_model()
    ids = torch.tensor([tokens(40)])
    with torch.no_grad():
        before = model(ids).logits
        change(model, what)
        assert (model(ids).logits.float() - before).abs().max() > 1e-2


def test_a_model_without_rotary_positions_has_no_other_ones():
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=257, n_positions=64)
    with pytest.raises(UnsupportedModelError, match="no rotary positions"):
        change(GPT2LMHeadModel(config), "rope")


def test_the_distribution_offers_the_driver():
    project = tomllib.loads((ROOT / "plugins/kvtier-transformers/pyproject.toml").read_text())["project"]
    (target,) = project["entry-points"][GROUP].values()
    assert target == f"{open_engine.__module__}:{open_engine.__name__}"
    assert list(project["entry-points"][GROUP]) == ["transformers"]


def test_no_options_and_no_tensor_parallelism_told_without_torch(certify, model):
    status, _, rows = certify("from kvtier_transformers.certify import open_engine\n", "--only", "tp2")
    assert status == 0
    assert rows["tp2"]["why"] == "transformers' engine runs in one process"
    arguments = [
        "certify",
        "--engine",
        "tiny",
        "--model",
        str(model),
        "--engine-options",
        '{"block_size": 4}',
    ]
    assert main(arguments) == 2
