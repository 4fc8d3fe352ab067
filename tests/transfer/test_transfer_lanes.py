"""What may go wrong around a device's lanes: callers' lists, exceptions and tensors, and devices left behind."""

import asyncio
import math
import threading
from array import array
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtier_core.transfer import CPUDevice, Direction, GroupTransfer, KVLayout, Pool
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import Gate, after, one, payload, random_tensor

MakePool = Callable[..., Pool]
MakeDevice = Callable[..., CPUDevice]

STORE, LOAD = Direction.STORE, Direction.LOAD


@pytest.fixture
def kv() -> list[torch.Tensor]:
    return [random_tensor((10, 64), torch.float32, seed=layer) for layer in range(2)]


@pytest.fixture
def pool(make_pool: MakePool) -> Pool:
    return make_pool()


@pytest.fixture
def device(make_device: MakeDevice, pool: Pool, kv: list[torch.Tensor]) -> CPUDevice:
    return make_device(KVLayout(kv), pool)


class _UnspeakableError(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), SystemExit(1), KeyboardInterrupt(), _UnspeakableError()], ids=repr
)
@pytest.mark.parametrize("raiser", ["on_finished", "compute_done"])
def test_c30_whatever_is_raised_on_a_lane_each_job_has_its_result_and_the_lane_lives(
    make_device: MakeDevice, pool: Pool, kv: list[torch.Tensor], error: BaseException, raiser: str
) -> None:
    def fail() -> None:
        raise error

    compute_done = fail if raiser == "compute_done" else None
    device = make_device(KVLayout(kv), pool, 0, fail if raiser == "on_finished" else None)
    for job_id in (1, 2):
        after(compute_done, device, STORE, job_id, one([0], [0]))
        after(compute_done, device, LOAD, job_id, one([0], [0]))
        assert device.wait(STORE, [job_id], TIMEOUT_S)
        assert device.wait(LOAD, [job_id], TIMEOUT_S)
    results = device.get_finished()
    for direction in Direction:
        assert [result.job_id for result in results if result.direction is direction] == [1, 2]
    assert {result.ok for result in results} == {raiser == "on_finished"}
    if raiser == "compute_done":
        assert all(type(error).__name__ in (result.error or "") for result in results)
    assert pool.control.is_settled(STORE, 2)


def test_c36_ids_may_be_changed_once_a_transfer_is_submitted(
    device: CPUDevice, pool: Pool, kv: list[torch.Tensor]
) -> None:
    gate = Gate()
    stores = np.array([0, 1]), [0, 1]
    loads = [8, 9], array("q", [5, 5])
    pool.rows_array[5] = 50
    after(gate, device, STORE, 1, one(*stores))
    after(gate, device, LOAD, 1, one(*loads))
    for ids in (*stores, *loads):  # the caller's buffers, used again
        ids[0], ids[1] = 6, 7
    gate.open()
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert [bytes(pool.row(row)[:512]) for row in range(2)] == [payload(kv, block) for block in range(2)]
    assert not pool.rows_array[6:].any()
    assert [payload(kv, block) for block in (8, 9)] == [bytes([50]) * 512] * 2


def test_any_time_can_be_waited_for(device: CPUDevice) -> None:
    gate = Gate()
    after(gate, device, LOAD, 1, one([0], [0]))
    assert gate.reached.wait(TIMEOUT_S)
    gate.open()
    assert device.wait(LOAD, [1], math.inf)
    assert device.shutdown(math.inf)


@pytest.mark.parametrize("change", ["data", "smaller", "larger"])
@pytest.mark.parametrize("direction", Direction)
def test_c40_a_tensor_that_was_given_other_memory_fails_its_transfers(
    make_device: MakeDevice, pool: Pool, change: str, direction: Direction
) -> None:
    tensors = [torch.ones(4, 64) for _ in range(2)]
    whole = [torch.ones(4, 32)]
    device = make_device(KVLayout(tensors, whole), pool)
    pool.rows_array[:] = 7
    if change == "data":
        tensors[1].data = torch.zeros(4, 64)
    else:
        tensors[1].untyped_storage().resize_(0 if change == "smaller" else 1 << 22)
    device.submit(direction, 1, one([1], [1]))
    device.submit(direction, 2, [GroupTransfer(group=1, block_ids=[1], rows=[2])])
    assert device.wait(direction, [1, 2], TIMEOUT_S)
    failed, other = device.get_finished()
    assert failed.error is not None
    assert "tensors of KV group 0 have been given other memory" in failed.error
    assert (pool.rows_array[1] == 7).all()
    assert other.ok


@pytest.mark.parametrize("worker", [-1, 2])
def test_c43_a_worker_that_the_pool_does_not_have_is_refused(make_pool: MakePool, worker: int) -> None:
    pool = make_pool(num_workers=2)
    with pytest.raises(ValueError, match=f"worker {worker} is not one of this pool's 2"):
        CPUDevice(KVLayout([torch.zeros(4, 16)]), pool, worker)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_c30_a_device_that_lacks_a_thread_leaves_neither_the_others_nor_its_number(
    make_device: MakeDevice, pool: Pool, kv: list[torch.Tensor], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a control group limits processes."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(2))  # for a helper and two lanes
    started: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            CPUDevice(KVLayout(kv), pool)
    for thread in started:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in started)
    device = make_device(KVLayout(kv), pool)
    device.submit(STORE, 1, one([0], [0]))
    assert device.wait(STORE, [1], TIMEOUT_S)


def test_c34_however_often_and_from_wherever_a_device_is_shut_down_it_lets_go_once(
    pool: Pool, kv: list[torch.Tensor]
) -> None:
    """What it lets go of twice, such as memory pinned for a GPU, may be somebody else's by then."""
    let_go: list[int] = []

    class Counting(CPUDevice):
        def _let_go(self) -> None:
            let_go.append(1)
            super()._let_go()

    device = Counting(KVLayout(kv), pool)
    ended: list[bool] = []
    together = threading.Barrier(4)

    def shut_down() -> None:
        together.wait(TIMEOUT_S)
        ended.append(device.shutdown(TIMEOUT_S))

    threads = [threading.Thread(target=shut_down) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert device.shutdown(TIMEOUT_S)
    assert ended == [True] * 4
    assert let_go == [1]
