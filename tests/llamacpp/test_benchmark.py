"""The benchmark runs, in small, and its page is made from what it found."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks/llamacpp.py"


@pytest.mark.timeout(600)
def test_llamacpp_is_compared_cold_from_disk_and_from_its_own_state(model, tmp_path, monkeypatch):
    arguments = ("--tokens", "48", "--rounds", "2", "--directory", tmp_path, "--model", model, "--json")
    done = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["ratios"]) == {"cold_vs_kvtier_48", "kvtier_vs_state_48", "empty_vs_cold_48"}
    assert all(ratio > 0 for ratio in found["ratios"].values())
    assert {name.removesuffix("_48") for name in found["seconds"]} == {"cold", "empty", "state", "kvtier"}
    assert list(tmp_path.iterdir()) == []
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    text = importlib.import_module("llamacpp").page(found)
    assert f"| kvtier, from disk | {found['seconds']['kvtier_48']['median']:.3f} (" in text
    assert max(map(len, text.splitlines())) <= 120
