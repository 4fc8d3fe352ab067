"""C40: compute that waits for layer n only finds that layer's bytes, and never those of a load that failed."""

import threading
from collections.abc import Callable

import pytest
import torch

from kvtier_core.transfer import CPUDevice, Direction, KVLayout, Pool
from kvtier_core.transfer import lane as lane_module
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import one, payload

LOAD = Direction.LOAD
_LAYERS = 5


@pytest.fixture
def kv() -> list[torch.Tensor]:
    return [torch.zeros(8, 64) for _ in range(_LAYERS)]


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool()


@pytest.fixture
def device(make_device: Callable[..., CPUDevice], pool: Pool, kv: list[torch.Tensor]) -> CPUDevice:
    return make_device(KVLayout(kv), pool)


class _Steps:
    """Holds a load by layer after each of its layers until the test lets it go on."""

    def __init__(self, device: CPUDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go = threading.Semaphore(0)
        lane = device._lanes[LOAD]
        reach = lane._reach

        def hold(job_id: int, layer: int) -> None:
            reach(job_id, layer)
            assert self._go.acquire(timeout=TIMEOUT_S)

        monkeypatch.setattr(lane, "_reach", hold)

    def go(self, layers: int = 1) -> None:
        self._go.release(layers)


def test_c40_a_layer_is_there_when_its_wait_is_over_and_later_ones_may_not_be(
    device: CPUDevice, pool: Pool, kv: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = _Steps(device, monkeypatch)
    pool.rows_array[:] = 7
    device.submit_load(1, one([3], [0]), epoch=0, by_layer=True)
    for layer in range(_LAYERS):
        assert device.wait_layer(1, layer, TIMEOUT_S)
        assert payload(kv[layer : layer + 1], 3) == b"\x07" * 256
        assert not any(tensor.any() for tensor in kv[layer + 1 :])
        if layer + 1 < _LAYERS:
            assert not device.wait_layer(1, layer + 1, 0.0)
        steps.go()
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert device.wait_layer(1, _LAYERS - 1, 0.0), "an ended load that was not collected is there"


def test_c40_200_loads_by_layer_beside_the_compute_that_reads_them(
    device: CPUDevice, pool: Pool, kv: list[torch.Tensor]
) -> None:
    for round_ in range(1, 201):
        stamp = round_ % 251 + 1
        pool.rows_array[:6] = stamp
        blocks = [1, 2, 3, 5, 6, 7]
        device.submit_load(round_, one(blocks, range(6)), epoch=0, by_layer=True)
        for layer in range(_LAYERS):
            assert device.wait_layer(round_, layer, TIMEOUT_S)
            found = kv[layer][blocks].view(torch.uint8)
            assert bool((found == stamp).all()), f"round {round_}, layer {layer}"
        assert device.wait(LOAD, [round_], TIMEOUT_S)
        assert [result.ok for result in device.get_finished()] == [True]


def test_a_load_as_a_whole_has_its_layers_when_it_ends(device: CPUDevice, pool: Pool) -> None:
    device.submit_load(1, one([3], [0]), epoch=0)
    assert device.wait_layer(1, 0, TIMEOUT_S)
    assert not device._lanes[LOAD]._unfinished


@pytest.mark.parametrize("fault", ["dropped", "failed", "unknown"])
def test_a_load_that_is_not_known_to_be_there_is_not_there(device: CPUDevice, pool: Pool, fault: str) -> None:
    if fault == "dropped":
        pool.control.bump_epoch()
    if fault != "unknown":
        rows = [pool.geometry.num_rows] if fault == "failed" else [0]
        device.submit_load(1, one([3], rows), epoch=0, by_layer=True)
        assert device.wait(LOAD, [1], TIMEOUT_S)
    assert not device.wait_layer(1, 0, TIMEOUT_S)
    device.get_finished()
    assert not device.wait_layer(1, 0, TIMEOUT_S)


def test_c40_a_load_whose_result_somebody_else_has_collected_is_still_there(
    device: CPUDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "_REMEMBERED", 3)
    for job_id in range(1, 6):
        device.submit_load(job_id, one([3], [0]), epoch=0, by_layer=True)
        assert device.wait(LOAD, [job_id], TIMEOUT_S)
        assert [result.ok for result in device.get_finished()] == [True]
        assert device.wait_layer(job_id, _LAYERS - 1, 0.0)
    assert [device.wait_layer(job_id, 0, 0.0) for job_id in range(1, 6)] == [False, False, True, True, True]


def test_a_wait_for_a_layer_ends_when_the_load_is_dropped_at_shutdown(
    device: CPUDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = _Steps(device, monkeypatch)
    device.submit_load(1, one([3], [0]), epoch=0, by_layer=True)
    device.submit_load(2, one([4], [0]), epoch=0, by_layer=True)
    assert device.wait_layer(1, 0, TIMEOUT_S)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(device.wait_layer(2, 0, TIMEOUT_S)))
    waiting.start()
    assert not device.shutdown(0.0)
    steps.go(_LAYERS)
    waiting.join(TIMEOUT_S)
    assert answers == [False]
