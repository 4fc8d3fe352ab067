"""The CUDA device on a simulated GPU: right bytes in random runs, and every deliberate mistake is seen."""

import re
from pathlib import Path

import pytest
import torch

from tests.transfer.kv import Gate
from tests.transfer.simgpu import mutants
from tests.transfer.simgpu.gpu import GPU, SimulatedEvent
from tests.transfer.simgpu.mutants import MUTANTS, Mutant
from tests.transfer.simgpu.run import run_jobs

_PAGE = Path(__file__).parents[2] / "docs" / "how-tested.md"
_HERE = torch.device("cuda", 0)


def test_c40_c41_c42_stores_and_loads_move_the_right_bytes_at_the_right_time() -> None:
    found = run_jobs(first_seed=0, jobs=800)
    assert found.wrong == []
    assert found.unseen_outcomes == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name.replace(" ", "-") for mutant in MUTANTS])
def test_c40_c41_a_deliberate_mistake_is_seen(mutant: Mutant) -> None:
    assert mutants.kill(mutant) is not None, "nothing has seen it"


def test_what_is_harmless_is_seen_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "RUNS", 3)
    harmless = Mutant("harmless", "streams:_as_items", "tensor.shape[0]", "len(tensor)")
    assert mutants.kill(harmless) is None


def test_the_page_about_testing_counts_the_mistakes() -> None:
    assert re.findall(r"(\d+) deliberate mistakes", _PAGE.read_text()) == [str(len(MUTANTS))]


def test_a_queued_copy_runs_later_and_an_event_says_when(gpu: GPU) -> None:
    stream, gate, event, memory = gpu.Stream(_HERE), Gate(), SimulatedEvent(), torch.zeros(4)
    event.synchronize()  # nothing was recorded
    stream.launch(gate)
    with gpu.stream(stream):
        memory.copy_(torch.ones(4), non_blocking=True)
    event.record(stream)
    assert memory.sum() == 0
    gate.open()
    event.synchronize()
    assert memory.sum() == 4


def test_a_stream_waits_for_what_was_recorded_before_it_was_told_to(gpu: GPU) -> None:
    stream, gate, event, memory = gpu.Stream(_HERE), Gate(), SimulatedEvent(), torch.zeros(4)
    gpu.compute.launch(gate)
    event.record(gpu.compute)
    stream.wait_event(event)
    with gpu.stream(stream):
        memory.copy_(torch.ones(4), non_blocking=True)
    event.record(stream)
    assert memory.sum() == 0
    gate.open()
    event.synchronize()
    assert memory.sum() == 4


def test_work_that_it_can_not_place_is_refused(gpu: GPU) -> None:
    memory = torch.zeros(4)
    with (
        gpu.stream(gpu.Stream(_HERE)),
        pytest.raises(AssertionError, match="can not tell when"),
    ):
        memory.sum()
