"""C42: the pool's rows are pinned for the CUDA device, or the log says why not. CUDA's answers are the test's."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from kvtier_core.transfer import CUDADevice, Direction, KVLayout, Pool, StreamDevice
from kvtier_core.transfer import cuda as cuda_module
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import one, payload, said_to_be_on_a_gpu
from tests.transfer.simgpu.gpu import GPU

STORE = Direction.STORE


class _Registry:
    """What CUDA has registered, by address; it refuses one call."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuse_call = -1
        self.fault: Exception | None = None
        self._calls = 0

    def register(self, address: int, size: int, flags: int) -> int:
        self._calls += 1
        if self._calls == self.refuse_call:
            if self.fault is not None:
                raise self.fault
            return 2
        self.registered[address] = size
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def cuda(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> _Registry:
    registry = _Registry()
    cudart = SimpleNamespace(cudaHostRegister=registry.register, cudaHostUnregister=registry.unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return registry


@pytest.fixture
def kv() -> list[torch.Tensor]:
    return [torch.full((8, 64), float(layer)) for layer in range(3)]


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool(num_rows=5)


def test_c42_rows_are_pinned_whole_a_few_at_a_time(
    cuda: _Registry, pool: Pool, kv: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_module, "_PIN_BYTES", 2 * pool.geometry.row_bytes + 100)
    device = CUDADevice(said_to_be_on_a_gpu(KVLayout(kv)), pool)
    row_bytes, address = pool.geometry.row_bytes, pool.address
    assert cuda.registered == {
        address: 2 * row_bytes,
        address + 2 * row_bytes: 2 * row_bytes,
        address + 4 * row_bytes: row_bytes,
    }
    assert device.shutdown(TIMEOUT_S)
    assert cuda.registered == {}


@pytest.mark.parametrize("fault", [None, RuntimeError("the driver is shutting down")])
def test_c42_a_refused_pin_is_told_undone_and_no_obstacle(
    cuda: _Registry,
    fault: Exception | None,
    pool: Pool,
    kv: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cuda_module, "_PIN_BYTES", 1)
    cuda.refuse_call, cuda.fault = 3, fault
    device = CUDADevice(said_to_be_on_a_gpu(KVLayout(kv)), pool)
    assert cuda.registered == {}
    assert device._pinned._addresses == []
    assert ("error 2 at row 2 of 5" if fault is None else str(fault)) in caplog.text
    assert "ulimit -l" in caplog.text
    device.submit(STORE, 1, one([2], [1]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert bytes(pool.row(1)[: 3 * 256]) == payload(kv, 2)
    assert device.shutdown(TIMEOUT_S)


def test_a_device_that_can_not_be_made_unpins(
    cuda: _Registry, pool: Pool, kv: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no memory left on the device")

    monkeypatch.setattr(StreamDevice, "__init__", refuse)
    with pytest.raises(RuntimeError, match="no memory left"):
        CUDADevice(said_to_be_on_a_gpu(KVLayout(kv)), pool)
    assert cuda.registered == {}


def test_c42_the_cuda_device_refuses_tensors_elsewhere(pool: Pool, kv: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="tensors on a CUDA GPU, not on cpu"):
        CUDADevice(KVLayout(kv), pool)
