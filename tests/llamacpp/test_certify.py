"""``kvtier certify`` on llama.cpp as it is, and on one whose adapter loads what it should not."""

import json
import sys

import pytest

from kvtier.main import main

GROUP = "kvtier.certify.v1"
DRIVER = "from kvtier_llamacpp.certify import open_engine\n"
FORGETS_TO_LOOK = """
import numpy as np
from kvtier_llamacpp.certify import open_engine
from kvtier_llamacpp.context import Context
from kvtier_llamacpp import engine

write_block = Context.write_block
size = []

def first_block_only(self, block):
    size.append(block.copy())
    changed = block.copy()
    changed[2000:] = size[0][2000:]  # the KV of the first block ever loaded, at this block's positions
    return write_block(self, changed)

measure = engine.measure

def measure_undisturbed(context):
    found = measure(context)
    Context.write_block = first_block_only
    return found

engine.measure = measure_undisturbed
"""


@pytest.fixture
def certify(site, model, config, monkeypatch, capsys):
    """Runs the command on the driver in a module; the exit status and the rows by scenario."""

    def run(driver, *arguments):
        site.install(
            "llama-driver", {GROUP: {"llama-test": "llama_driver:open_engine"}}, {"llama_driver": driver}
        )
        monkeypatch.setenv("PYTHONPATH", ":".join([str(site.path), *filter(None, sys.path)]))
        status = main(
            [
                *("certify", "--engine", "llama-test", "--model", str(model), "--tokens", "90", "--json"),
                *("--config", str(config), *arguments),
            ]
        )
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        return status, report, {row["scenario"]: row for row in report["rows"]}

    return run


@pytest.mark.timeout(900)
def test_smollm2_in_llamacpp_is_certified(certify, scenarios):
    status, report, rows = certify(DRIVER, *scenarios)
    assert status == 0, report["why_not"]
    assert report["certified"]
    assert rows["restart"]["restored"]["disk"] == 80
    if not scenarios:
        skipped = {name for name, row in rows.items() if row["verdict"] == "skipped"}
        assert skipped == {"reset", "rope", "dtype", "weights", "stale", "tp2"}


@pytest.mark.timeout(900)
def test_an_adapter_that_loads_the_wrong_block_is_not_certified(certify):
    status, report, rows = certify(FORGETS_TO_LOOK, "--only", "restart")
    assert status == 1
    assert not report["certified"]
    assert rows["restart"]["verdict"] == "FAIL"
