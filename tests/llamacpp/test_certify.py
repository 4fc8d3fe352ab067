"""``kvtier certify`` on llama.cpp as it is, and on one whose adapter loads what it should not."""

import json
import sys

import pytest

from kvtier.main import main
from tests.llamacpp.tiny_gguf import write_jamba

GROUP = "kvtier.certify.v1"
DRIVER = "from kvtier_llamacpp.certify import open_engine\n"
FORGETS_TO_LOOK = """
import numpy as np
from kvtier_llamacpp.certify import open_engine
from kvtier_llamacpp.context import Context
from kvtier_llamacpp import keeper

write_block = Context.write_block
size = []

def first_block_only(self, index, block):
    size.append(block.copy())
    changed = block.copy()
    changed[2000:] = size[0][2000:]  # the KV of the first block ever loaded, at this block's positions
    return write_block(self, index, changed)

measure = keeper.measure

def measure_undisturbed(context):
    found = measure(context)
    Context.write_block = first_block_only
    return found

keeper.measure = measure_undisturbed
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


OTHER_STATE = """
from kvtier_llamacpp.certify import open_engine
from kvtier_llamacpp.copies import Copies

read_state = Copies.read_state

def read_the_first_alone(self):
    first = getattr(self, "first", None)
    read_state(self)
    if first is None:
        self.first = self._state_bytes.copy()
    else:
        self._state_bytes[16:] = first[16:]  # behind its position

Copies.read_state = read_the_first_alone
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("driver", "status"), [(DRIVER, 0), (OTHER_STATE, 1)], ids=["right", "wrong"])
def test_a_model_with_a_state_is_certified_unless_it_goes_on_from_another(certify, tmp_path, driver, status):
    path = write_jamba(tmp_path / "jamba.gguf")
    found, report, rows = certify(driver, "--model", str(path), "--only", "restart")
    assert found == status
    assert report["certified"] is (status == 0)
    assert rows["restart"]["verdict"] == ("FAIL" if status else "pass")
    assert rows["restart"]["restored"]["disk"] >= 80


@pytest.mark.timeout(900)
def test_an_adapter_that_loads_the_wrong_block_is_not_certified(certify):
    status, report, rows = certify(FORGETS_TO_LOOK, "--only", "restart")
    assert status == 1
    assert not report["certified"]
    assert rows["restart"]["verdict"] == "FAIL"
