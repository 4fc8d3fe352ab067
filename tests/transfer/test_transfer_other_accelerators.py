"""Accelerators that torch does not call ``cuda``: the same streams, and the same self-test."""

from collections.abc import Iterator

import pytest
import torch

from kvtier_core.transfer import (
    Direction,
    KVLayout,
    SelfTestError,
    StreamDevice,
    open_device,
    self_test,
    selftest,
)
from tests.coordinator.mutate import changed
from tests.transfer.conftest import TIMEOUT_S, MakePool
from tests.transfer.kv import one, payload, random_tensor, row_bytes, said_to_be_on_a_gpu
from tests.transfer.simgpu.gpu import GPU
from tests.transfer.simgpu.mutants import MUTANTS, Mutant

_TRIES = 20


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[KVLayout]:
    """KV on a simulated accelerator that torch calls ``xpu``, which has no sleep."""
    monkeypatch.setattr(selftest, "_PRODUCTS", 1)
    gpu = GPU(0, "xpu")
    with gpu.installed():
        yield said_to_be_on_a_gpu(
            KVLayout([random_tensor((40, 64), torch.uint8, seed) for seed in range(3)]), "xpu"
        )
    assert gpu.faults == []


def test_it_passes_and_moves_every_byte(layout: KVLayout, make_pool: MakePool) -> None:
    pool = make_pool(num_rows=40, row_bytes=row_bytes(layout))
    device = open_device(layout, pool)
    assert type(device) is StreamDevice
    report = self_test(device, layout, pool)
    assert "the pool is NOT pinned" in report.describe()
    tensors = list(layout.groups[0].tensors)
    before = payload(tensors, 7)
    device.submit(Direction.STORE, 8, one([7], [3]))
    assert device.wait(Direction.STORE, [8], TIMEOUT_S)
    device.submit(Direction.LOAD, 8, one([9], [3]))
    assert device.wait(Direction.LOAD, [8], TIMEOUT_S)
    assert payload(tensors, 9) == before
    assert device.shutdown(TIMEOUT_S)


@pytest.mark.parametrize("mutant", MUTANTS[:3], ids=[mutant.name.replace(" ", "-") for mutant in MUTANTS[:3]])
def test_one_that_does_not_wait_is_refused(layout: KVLayout, make_pool: MakePool, mutant: Mutant) -> None:
    def try_often() -> None:
        for _ in range(_TRIES):
            pool = make_pool(num_rows=40, row_bytes=row_bytes(layout))
            device = open_device(layout, pool)
            try:
                self_test(device, layout, pool)
            finally:
                assert device.shutdown(TIMEOUT_S)

    with (
        changed(f"kvtier_core.transfer.{mutant.place}", mutant.old, mutant.new),
        pytest.raises(SelfTestError, match="^xpu:0 .worker 0. did not pass"),
    ):
        try_often()
