"""Whoever gives KV memory up waits first until no copy that was handed out touches it any more (C36)."""

import threading
from collections.abc import Callable

import pytest
import torch

from kvtier_core.transfer import CPUDevice, Direction, KVLayout, Pool
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import Gate, after, one, random_tensor

MakePool = Callable[..., Pool]
MakeDevice = Callable[..., CPUDevice]


@pytest.fixture
def layout() -> KVLayout:
    return KVLayout([random_tensor((10, 64), torch.float32, seed=0)])


def wait_in_thread(pool: Pool) -> tuple[threading.Thread, list[bool]]:
    """Waits for the copies until they are over, and what that came to."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(pool.wait_for_copies(TIMEOUT_S)))
    thread.start()
    return thread, answers


@pytest.mark.parametrize("direction", Direction)
def test_v13_copies_that_run_and_copies_that_wait_are_waited_for(
    make_pool: MakePool, make_device: MakeDevice, layout: KVLayout, direction: Direction
) -> None:
    pool, gate = make_pool(), Gate()
    device = make_device(layout, pool)
    assert pool.wait_for_copies(0.0)
    after(gate, device, direction, 1, one([0], [0]))
    device.submit(direction, 2, one([1], [1]))
    assert gate.reached.wait(TIMEOUT_S)
    assert not pool.wait_for_copies(0.0)
    thread, answers = wait_in_thread(pool)
    gate.open()
    thread.join(TIMEOUT_S)
    assert answers == [True]
    assert device.wait(direction, [1, 2], TIMEOUT_S)


def test_v13_a_copy_in_the_middle_is_waited_for(make_pool: MakePool, layout: KVLayout) -> None:
    gate = Gate()

    class SlowDevice(CPUDevice):
        def _copy(self, direction, plan) -> None:
            gate()
            super()._copy(direction, plan)

    pool = make_pool()
    device = SlowDevice(layout, pool)
    device.submit(Direction.STORE, 1, one([0], [0]))
    assert gate.reached.wait(TIMEOUT_S)
    assert not pool.wait_for_copies(0.0)
    gate.open()
    assert pool.wait_for_copies(TIMEOUT_S)
    assert device.shutdown(TIMEOUT_S)


def test_v13_the_copies_of_every_worker_are_waited_for(
    make_pool: MakePool, make_device: MakeDevice, layout: KVLayout
) -> None:
    pool, gate = make_pool(num_workers=2), Gate()
    devices = [make_device(layout, pool, worker) for worker in range(2)]
    devices[0].submit(Direction.LOAD, 1, one([0], [0]))
    after(gate, devices[1], Direction.LOAD, 1, one([0], [0]))
    assert devices[0].wait(Direction.LOAD, [1], TIMEOUT_S)
    assert not pool.wait_for_copies(0.0)
    gate.open()
    assert pool.wait_for_copies(TIMEOUT_S)


def test_v13_what_a_shutdown_drops_is_over(
    make_pool: MakePool, make_device: MakeDevice, layout: KVLayout
) -> None:
    pool, gate = make_pool(), Gate()
    device = make_device(layout, pool)
    after(gate, device, Direction.STORE, 1, one([0], [0]))
    device.submit(Direction.STORE, 2, one([1], [1]))
    gate.open()
    assert device.shutdown(TIMEOUT_S)
    assert pool.wait_for_copies(0.0)
