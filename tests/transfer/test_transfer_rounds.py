"""K2-O4, K4-O1: the races of device blocks, 200 rounds each, against compute that is slow or quick."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from kvtier_core.transfer import CPUDevice, Direction, KVLayout, Pool
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import after, one, payload

STORE, LOAD = Direction.STORE, Direction.LOAD
_ROUNDS = 200
_LAYERS = 3


class _Compute:
    """A compute stream: one thread that runs kernels in order; an event is set when all before it have ended."""

    def __init__(self) -> None:
        self._kernels: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def launch(self, kernel: Callable[[], None]) -> None:
        with self._changed:
            self._kernels.append(kernel)
            self._changed.notify()

    def record(self) -> threading.Event:
        event = threading.Event()
        self.launch(event.set)
        return event

    def stop(self) -> None:
        self._stopped = True
        self.launch(lambda: None)
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopped:
            with self._changed:
                self._changed.wait_for(lambda: self._kernels)
                kernel = self._kernels.pop(0)
            kernel()


@pytest.fixture
def compute() -> Iterator[_Compute]:
    stream = _Compute()
    yield stream
    stream.stop()


@pytest.fixture
def kv() -> list[torch.Tensor]:
    return [torch.zeros(8, 2048, dtype=torch.uint8) for _ in range(_LAYERS)]


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool()


@pytest.fixture
def device(make_device: Callable[..., CPUDevice], pool: Pool, kv: list[torch.Tensor]) -> CPUDevice:
    return make_device(KVLayout(kv), pool)


def _slow_fill(kv: list[torch.Tensor], block: int, value: int) -> Callable[[], None]:
    """A kernel that writes its layers one by one, now and then with a pause between them."""

    def kernel() -> None:
        for tensor in kv:
            if value % 8 == 0:
                time.sleep(0.001)  # slow compute, not synchronisation
            tensor[block] = value

    return kernel


def test_k2_o4_c40_a_store_issued_at_once_holds_what_the_compute_wrote_last(
    device: CPUDevice, pool: Pool, kv: list[torch.Tensor], compute: _Compute
) -> None:
    for round_ in range(1, _ROUNDS + 1):
        value = round_ % 255 + 1
        compute.launch(_slow_fill(kv, 2, 0))
        compute.launch(_slow_fill(kv, 2, value))
        after(compute.record().wait, device, STORE, round_, one([2], [1]))
        assert device.wait(STORE, [round_], TIMEOUT_S)
        assert bytes(pool.row(1)[: _LAYERS * 2048]) == bytes([value]) * _LAYERS * 2048, f"round {round_}"
    assert all(result.ok for result in device.get_finished())


def test_k2_o4_a_store_that_does_not_wait_is_caught_by_the_same_rounds(
    device: CPUDevice, pool: Pool, kv: list[torch.Tensor], compute: _Compute
) -> None:
    wrong = 0
    for round_ in range(1, _ROUNDS + 1):
        value = round_ % 255 + 1
        compute.launch(_slow_fill(kv, 2, 0))
        compute.launch(_slow_fill(kv, 2, value))
        device.submit(STORE, round_, one([2], [1]))
        assert device.wait(STORE, [round_], TIMEOUT_S)
        wrong += bytes(pool.row(1)[: _LAYERS * 2048]) != bytes([value]) * _LAYERS * 2048
        assert compute.record().wait(TIMEOUT_S)
    assert wrong > 0


def _wait_for_load(device: CPUDevice, job_id: int) -> None:
    assert device.wait(LOAD, [job_id], TIMEOUT_S)


def test_c40_compute_after_a_load_reads_what_was_loaded(
    device: CPUDevice, pool: Pool, kv: list[torch.Tensor], compute: _Compute
) -> None:
    read: list[bytes] = []
    for round_ in range(1, _ROUNDS + 1):
        value = round_ % 255 + 1
        pool.rows_array[4] = value
        device.submit(LOAD, round_, one([6], [4]))
        compute.launch(partial(_wait_for_load, device, round_))
        compute.launch(lambda: read.append(payload(kv, 6)))
        assert compute.record().wait(TIMEOUT_S)
        assert read[-1] == bytes([value]) * _LAYERS * 2048, f"round {round_}"


def test_k4_o1_a_block_reused_after_its_wait_never_reaches_the_old_row(
    device: CPUDevice, pool: Pool, kv: list[torch.Tensor], compute: _Compute
) -> None:
    for round_ in range(1, _ROUNDS + 1):
        old = round_ % 254 + 1
        compute.launch(_slow_fill(kv, 7, old))
        after(compute.record().wait, device, STORE, round_, one([7], [3]))
        assert device.wait(STORE, [round_], TIMEOUT_S)  # the engine preempts: it must wait before it reuses
        compute.launch(_slow_fill(kv, 7, 255))
        assert bytes(pool.row(3)[: _LAYERS * 2048]) == bytes([old]) * _LAYERS * 2048, f"round {round_}"
        assert compute.record().wait(TIMEOUT_S)
        assert bytes(pool.row(3)[: _LAYERS * 2048]) == bytes([old]) * _LAYERS * 2048, f"round {round_}"
