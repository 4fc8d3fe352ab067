"""``kvtier certify`` on real SGLang as it is, and on one whose linker misreads what it loads."""

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.main import main
from kvtier_core import ConfigError, UnsupportedModelError
from kvtier_sglang.certify import open_engine
from tests.sglang.engines import OPTIONS, PAGE, environment, needs_sglang

ROOT = Path(__file__).parents[2]
GROUP = "kvtier.certify.v1"
PAGES = 9
"""The whole ones of the document."""
pytestmark = pytest.mark.timeout(2400)
MISREADING = """
from kvtier_sglang import canary, memory
from kvtier_sglang.cache import PageCache

as_pages, load = memory.as_pages, PageCache.load
found = []


def swap_k_and_v(cache, name, blocks):
    loaded = load(cache, name, blocks)
    first_k, first_v = found[0], found[len(found) // 2]
    for number in blocks[0].numbers if loaded else ():
        page = slice(number * 16, number * 16 + 16)
        first_k[page], first_v[page] = first_v[page].clone(), first_k[page].clone()
    return loaded


def remember(buffers, tokens_per_page):
    found.extend(buffers)
    return as_pages(buffers, tokens_per_page)


def register():
    memory.as_pages = remember
    canary.check_blocks = lambda *_: None  # it would refuse the engine at its start
    PageCache.load = swap_k_and_v
"""


@pytest.fixture
def certify(site, model, monkeypatch, capsys):
    """Runs the command on the driver; the exit status, the report, and its rows by scenario."""

    def run(*arguments):
        for name, value in environment().items():
            monkeypatch.setenv(name, value)
        driver = {GROUP: {"sglang-test": "kvtier_sglang.certify:open_engine"}}
        site.install("sglang-driver", driver, {})
        status = main(
            [
                *("certify", "--engine", "sglang-test", "--model", str(model), "--tokens", "150"),
                *("--json", "--engine-options", json.dumps(OPTIONS), *arguments),
            ]
        )
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        return status, report, {row["scenario"]: row for row in report["rows"]}

    return run


@needs_sglang
def test_sglang_is_certified(certify):
    status, report, rows = certify("--only", "restart,reset,weights,stale")
    assert status == 0, report["why_not"]
    assert report["certified"]
    assert report["tokens_per_block"] == PAGE
    assert {row["verdict"] for row in rows.values()} == {"pass"}
    assert rows["pool"]["restored"] == {"pool": rows["pool"]["restored_tokens"]}
    assert rows["restart"]["restored"]["disk"] == PAGES * PAGE
    assert rows["stale"]["restored"].get("disk", 0) < PAGES * PAGE
    for name in ("reset", "weights"):
        assert not rows[name]["restored_tokens"]
        assert rows[f"{name} again"]["restored_tokens"] == rows["pool"]["restored_tokens"]


@needs_sglang
def test_a_linker_that_loads_v_for_k_in_one_layer_is_not_certified(certify, site):
    plugin = {"sglang.srt.plugins": {"misreading": "misreading:register"}}
    site.install("misreading", plugin, {"misreading": MISREADING})
    status, report, rows = certify("--only", "pool")
    assert (status, report["certified"]) == (1, False)
    assert rows["empty tiers"]["verdict"] == "pass"
    assert rows["pool"]["verdict"] == "FAIL"
    assert rows["pool"]["why"].startswith("first wrong after ")


@pytest.mark.parametrize("name", ["max_total_tokens", "unified_cache_external_linker_config"])
def test_options_that_certifying_sets_are_refused(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"{name} can't be set"):
        open_engine(SimpleNamespace(model=tmp_path, engine_options={name: "anything"}))


def test_a_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a directory that has a config.json"):
        open_engine(SimpleNamespace(model=tmp_path / "config.json", engine_options={}))


def test_variants_are_other_arguments(model, tmp_path):
    from kvtier_sglang.certify.variants import change

    _, other = change("rope", model, {"json_model_override_args": '{"vocab_size": 256}'}, tmp_path)
    overrides = json.loads(other["json_model_override_args"])
    assert overrides["rope_parameters"]["rope_theta"] == 2 * 10000.0
    assert overrides["vocab_size"] == 256
    assert change("dtype", model, {"dtype": "float32"}, tmp_path)[1]["dtype"] == "bfloat16"
    assert change("dtype", model, {}, tmp_path)[1]["dtype"] == "float32"
    assert change("tp2", model, {}, tmp_path)[1]["tp_size"] == 2
    with pytest.raises(UnsupportedModelError, match="several ranks already"):
        change("tp2", model, {"tp_size": 2}, tmp_path)
    with pytest.raises(UnsupportedModelError, match="can't change vocabulary"):
        change("vocabulary", model, {}, tmp_path)


def test_the_distribution_offers_the_driver():
    project = tomllib.loads((ROOT / "plugins/kvtier-sglang/pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == {"sglang": f"{open_engine.__module__}:{open_engine.__name__}"}
