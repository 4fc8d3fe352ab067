"""A session whose KV is on the simulated GPU: the device is tested first, and serves then."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier_core import UnsupportedModelError
from kvtier_core.transfer import SELF_TEST_JOBS, Direction
from tests.coordinator.mutate import changed
from tests.session.toy import PATIENCE_S, TOKENS, Toy
from tests.transfer.simgpu.gpu import GPU
from tests.transfer.simgpu.mutants import MUTANTS


def _pools() -> int:
    """How many are mapped in this process: tests before may have left one for good, or garbage that goes meanwhile."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvtier-pool")


@pytest.fixture
def gpu() -> Iterator[GPU]:
    made = GPU(seed=0)
    with made.installed():
        yield made
    assert made.faults == []


def test_c44_the_device_of_a_session_is_tested_and_blocks_come_back(
    gpu: GPU, make_toy: Callable[..., Toy]
) -> None:
    toy = make_toy(is_on_a_gpu=True)
    control = toy.session._pool.control
    for direction in Direction:
        assert control.get_last_finished(0, direction) == SELF_TEST_JOBS
    tokens = list(range(4 * TOKENS + 1))
    assert toy.run("cold", tokens) == 0
    assert toy.run("warm", tokens) == 4 * TOKENS
    assert control.get_last_finished(0, Direction.LOAD) > SELF_TEST_JOBS
    assert toy.session.close(PATIENCE_S)


def test_c44_a_session_on_a_device_that_copies_wrong_is_not_opened(
    gpu: GPU, make_toy: Callable[..., Toy]
) -> None:
    before = _pools()
    mistake = next(mutant for mutant in MUTANTS if mutant.name == "rows are off by one")
    with (
        changed(f"kvtier_core.transfer.{mistake.place}", mistake.old, mistake.new),
        pytest.raises(UnsupportedModelError, match="can't serve this engine: cuda:0 .worker 0. did not pass"),
    ):
        make_toy(is_on_a_gpu=True)
    assert _pools() == before
