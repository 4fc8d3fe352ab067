"""Real vLLM whose KV is taken to be on the simulated GPU: right answers, and a mistake in the order is seen."""

import json

import pytest

from tests.transfer.simgpu.mutants import MUTANTS
from tests.vllm import soak
from tests.vllm.engines import EngineError, connector, disk, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(3600)]
_EARLY_STORES = next(mutant for mutant in MUTANTS if mutant.name == "a store does not wait for compute")
_MISTAKE = (f"kvtier_core.transfer.{_EARLY_STORES.place}", _EARLY_STORES.old, _EARLY_STORES.new)


def test_c40_c44_500_answers_are_those_without_connector(capsys):
    status = soak.main(["--requests", "600", "--simulated-gpu", "--json"])
    said = capsys.readouterr().out
    report = json.loads(said.splitlines()[-1])
    assert status == report["mismatches"] == report["stops"] == 0, said
    assert report["answers"] >= 500, said
    for number in ("hit_blocks", "asynchronous", "preemptions", "resets", "aborts"):
        assert report[number] > 0, f"{number}: {said}"


def test_c44_stores_that_do_not_wait_for_compute_stop_the_start(start, tmp_path):
    gpu = {"seed": 0, "mistake": _MISTAKE, "is_tested": False}
    with pytest.raises(
        EngineError, match="cuda:0 .worker 0. did not pass kvtier's self-test: in round 1 of 7"
    ):
        start(connector(disk(tmp_path)), simulated_gpu=gpu)


def test_c40_stores_that_do_not_wait_for_compute_give_other_answers(tmp_path, capsys):
    tallies = soak.soak(150, 0, ["llama"], tmp_path, {"mistake": _MISTAKE})
    assert tallies["llama"].mismatches > 0, capsys.readouterr().out
