"""The CUDA device's order of events without a GPU: streams and events that only write down what is asked of them.

The copies are real, over tensors in host memory; that they are right is shown by the staged device's tests.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kvtier_core.transfer import CUDADevice, Direction, KVLayout, Pool, StagedDevice
from kvtier_core.transfer import cuda as cuda_module
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import one, payload, said_to_be_on_a_gpu

STORE, LOAD = Direction.STORE, Direction.LOAD


class _FakeCUDA:
    """Stands in for ``torch.cuda``: every call is a line of ``log``; events are set by the test or at once."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.compute_ends = threading.Event()
        self.compute_ends.set()
        self.refuse_registration = -1
        self.registration_fault: Exception | None = None
        self.entered: dict[str, torch.device] = {}
        """The device that each thread works on."""
        self.registered: dict[int, int] = {}
        self._streams = iter(_FakeStream(self, name) for name in ("store stream", "load stream"))
        self._calls = 0

    def Stream(self, device: torch.device) -> "_FakeStream":  # noqa: N802 - torch's name
        return next(self._streams)

    def Event(self, *, blocking: bool) -> "_FakeEvent":  # noqa: N802 - torch's name
        assert blocking, "a waiting thread must not spin"
        return _FakeEvent(self)

    def current_stream(self, device: torch.device) -> "_FakeStream":
        return _FakeStream(self, "compute stream")

    @contextmanager
    def stream(self, stream: "_FakeStream") -> Iterator[None]:
        stream.catch_up()
        self.log.append(f"copy on {stream.name}")
        yield

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    def set_device(self, device: torch.device) -> None:
        self.entered[threading.current_thread().name] = device

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, address: int, size: int, flags: int) -> int:
        self._calls += 1
        if self._calls == self.refuse_registration:
            if self.registration_fault is not None:
                raise self.registration_fault
            return 2
        self.registered[address] = size
        return 0

    def _unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class _FakeEvent:
    def __init__(self, cuda: _FakeCUDA) -> None:
        self._cuda = cuda
        self.stream = ""

    def record(self, stream: "_FakeStream") -> None:
        self.stream = stream.name
        self._cuda.log.append(f"record on {self.stream}")

    def synchronize(self) -> None:
        if self.stream == "compute stream":
            assert self._cuda.compute_ends.wait(TIMEOUT_S)
        self._cuda.log.append(f"wait for {self.stream}")


class _FakeStream:
    """Its copies are the host's, so what a GPU's stream waits for is waited for when the next copy is queued."""

    def __init__(self, cuda: _FakeCUDA, name: str) -> None:
        self._cuda = cuda
        self.name = name
        self._awaited: list[_FakeEvent] = []

    def wait_event(self, event: _FakeEvent) -> None:
        self._cuda.log.append(f"{self.name} waits for {event.stream}")
        self._awaited.append(event)

    def catch_up(self) -> None:
        while self._awaited:
            self._awaited.pop()
            assert self._cuda.compute_ends.wait(TIMEOUT_S)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _FakeCUDA:
    fake = _FakeCUDA()
    for name in ("Stream", "Event", "current_stream", "stream", "device", "set_device", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        fake.log.append("pin ids")
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return fake


@pytest.fixture
def kv() -> list[torch.Tensor]:
    return [torch.full((8, 64), float(layer)) for layer in range(3)]


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool(num_rows=5)


@pytest.fixture
def device(cuda: _FakeCUDA, pool: Pool, kv: list[torch.Tensor]) -> Iterator[CUDADevice]:
    made = CUDADevice(said_to_be_on_a_gpu(KVLayout(kv)), pool)
    assert cuda.log == ["copy on store stream", "copy on load stream"], (
        "each staging buffer is its stream's own"
    )
    cuda.log.clear()
    yield made
    assert made.shutdown(TIMEOUT_S)
    assert cuda.registered == {}, "rows stay pinned"


def test_k2_o4_c40_a_store_waits_for_the_compute_queued_before_it(
    cuda: _FakeCUDA, device: CUDADevice, pool: Pool, kv: list[torch.Tensor]
) -> None:
    cuda.compute_ends.clear()
    device.submit(STORE, 1, one([2], [1]))
    assert cuda.log == ["record on compute stream"]
    kv[0][2] = 77.0  # what the compute writes
    cuda.compute_ends.set()
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert cuda.log == [
        "record on compute stream",
        "wait for compute stream",
        "copy on store stream",
        "pin ids",
        "record on store stream",
        "wait for store stream",
    ]
    assert bytes(pool.row(1)[: 3 * 256]) == payload(kv, 2)


def test_c40_a_loads_copies_follow_the_compute_queued_before_it_and_its_result_follows_them(
    cuda: _FakeCUDA, device: CUDADevice, pool: Pool, kv: list[torch.Tensor]
) -> None:
    cuda.compute_ends.clear()
    pool.rows_array[1] = 6
    device.submit(LOAD, 1, one([2], [1]))
    assert cuda.log[0] == "record on compute stream"
    kv[0][2] = 0.0  # what an engine's kernel still does to a new block
    cuda.compute_ends.set()
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert cuda.log == [
        "record on compute stream",
        "load stream waits for compute stream",
        "copy on load stream",
        "pin ids",
        "record on load stream",
        "wait for load stream",
    ]
    assert payload(kv, 2) == b"\x06" * 3 * 256


def test_c42_a_lanes_thread_works_on_the_tensors_gpu(cuda: _FakeCUDA, device: CUDADevice) -> None:
    device.submit(STORE, 1, one([2], [1]))
    device.submit(LOAD, 1, one([2], [1]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert cuda.entered == dict.fromkeys(["kvtier-store-0", "kvtier-load-0"], torch.device("cuda", 0))


def test_a_lane_that_can_not_enter_its_gpu_says_so_and_goes_on(
    cuda: _FakeCUDA,
    pool: Pool,
    kv: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError(f"no {device} here")

    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    device = CUDADevice(said_to_be_on_a_gpu(KVLayout(kv)), pool)
    device.submit(STORE, 1, one([2], [1]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert [result.ok for result in device.get_finished()] == [True]
    assert device.shutdown(TIMEOUT_S)
    assert "the store lane could not set up its thread" in caplog.text
    assert "no cuda:0 here" in caplog.text


def test_c42_rows_are_pinned_whole_a_few_at_a_time(
    cuda: _FakeCUDA, pool: Pool, kv: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
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
    cuda: _FakeCUDA,
    fault: Exception | None,
    pool: Pool,
    kv: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cuda_module, "_PIN_BYTES", 1)
    cuda.refuse_registration, cuda.registration_fault = 3, fault
    device = CUDADevice(said_to_be_on_a_gpu(KVLayout(kv)), pool)
    assert cuda.registered == {}
    assert device._pinned._addresses == []
    assert ("error 2 at row 2 of 5" if fault is None else str(fault)) in caplog.text
    assert "ulimit -l" in caplog.text
    device.submit(STORE, 1, one([2], [1]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert [result.ok for result in device.get_finished()] == [True]
    assert device.shutdown(TIMEOUT_S)


def test_a_device_that_can_not_be_made_unpins(
    cuda: _FakeCUDA, pool: Pool, kv: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no memory left on the device")

    monkeypatch.setattr(StagedDevice, "__init__", refuse)
    with pytest.raises(RuntimeError, match="no memory left"):
        CUDADevice(said_to_be_on_a_gpu(KVLayout(kv)), pool)
    assert cuda.registered == {}


def test_c42_the_cuda_device_refuses_tensors_elsewhere(pool: Pool, kv: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="tensors on a CUDA GPU, not on cpu"):
        CUDADevice(KVLayout(kv), pool)
