"""C42: the pool's rows are pinned for the CUDA device, or the log says why not. CUDA's answers are the test's."""

import logging
import mmap
import re
import resource
import threading
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from kvtier_core.transfer import CUDADevice, Direction, KVLayout, Pool, PoolGeometry, StreamDevice
from kvtier_core.transfer import pinning as pinning_module
from kvtier_core.transfer import prefault as prefault_module
from kvtier_core.transfer.pinning import plan_pins
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
        self.threads: set[threading.Thread] = set()
        self._calls = 0

    def register(self, address: int, size: int, flags: int) -> int:
        self._calls += 1
        if self._calls == self.refuse_call:
            if self.fault is not None:
                raise self.fault
            return 2
        self.registered[address] = size
        self.threads.add(threading.current_thread())
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
    monkeypatch.setattr(pinning_module, "_CALL_BYTES", 2 * pool.geometry.row_bytes + 100)
    device = CUDADevice(said_to_be_on_a_gpu(KVLayout(kv)), pool)
    row_bytes, address = pool.geometry.row_bytes, pool.address
    assert cuda.registered == {
        address: 2 * row_bytes,
        address + 2 * row_bytes: 2 * row_bytes,
        address + 4 * row_bytes: row_bytes,
    }
    assert device.shutdown(TIMEOUT_S)
    assert cuda.registered == {}


def test_v11_a_worker_pins_its_own_part_wherever_that_begins(
    cuda: _Registry, make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning_module, "_WORTH_A_CALL", 4096)
    pool = make_pool(num_rows=2, row_bytes=32768, num_workers=2)
    kv = [torch.zeros(8, 4096, dtype=torch.uint8)]
    device = CUDADevice(said_to_be_on_a_gpu(KVLayout(kv, row_offsets=[20480])), pool, 1)
    assert cuda.registered == {pool.address + row * 32768 + 20480: 4096 for row in (0, 1)}
    assert device.shutdown(TIMEOUT_S)


@pytest.mark.parametrize("fault", [None, RuntimeError("the driver is shutting down")])
def test_c42_a_refused_pin_is_told_undone_and_no_obstacle(
    cuda: _Registry,
    fault: Exception | None,
    pool: Pool,
    kv: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pinning_module, "_CALL_BYTES", 1)
    cuda.refuse_call, cuda.fault = 3, fault
    device = CUDADevice(said_to_be_on_a_gpu(KVLayout(kv)), pool)
    assert cuda.registered == {}
    assert device._pinned._addresses == []
    assert ("error 2 at byte 16384 of a pool" if fault is None else str(fault)) in caplog.text
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


_KIB = 1 << 10


@pytest.mark.parametrize("page", [4 * _KIB, 64 * _KIB])
@pytest.mark.parametrize("row_bytes", [4 * _KIB, 20 * _KIB, 128 * _KIB, 2048 * _KIB])
@pytest.mark.parametrize(("num_rows", "num_workers"), [(1, 1), (37, 1), (37, 2), (37, 8), (20_000, 8)])
def test_c42_every_row_part_is_in_one_stretch_and_every_page_in_at_most_one(
    page: int, row_bytes: int, num_rows: int, num_workers: int
) -> None:
    geometry = PoolGeometry(num_rows=num_rows, row_bytes=row_bytes, num_workers=num_workers)
    size = (row_bytes - 64) // num_workers
    for worker in {0, num_workers - 1}:
        own = worker * size, (worker + 1) * size
        pins = plan_pins(geometry, own, page)
        assert all(begin % page == 0 and end % page == 0 for begin, end in pins)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(pins))
        assert pins[0][0] >= 0
        assert pins[-1][1] <= -(-num_rows * row_bytes // page) * page
        assert all(end - begin <= 1 << 30 for begin, end in pins)
        assert len(pins) <= max(pinning_module._MOST_CALLS, -(-num_rows * row_bytes >> 29))
        stretches = iter(pins)
        begin, end = next(stretches)
        for row in range(num_rows):
            first, last = row * row_bytes + own[0], row * row_bytes + own[1]
            while end < last:
                begin, end = next(stretches)
            assert begin <= first


def test_c42_a_worker_pins_its_own_part_where_that_is_less() -> None:
    geometry = PoolGeometry(num_rows=1000, row_bytes=1 << 20, num_workers=8)
    part = (1 << 17) - 8
    pinned = sum(end - begin for begin, end in plan_pins(geometry, (part, 2 * part), 4096))
    assert pinned <= 1000 * (part + 8192)
    alone = PoolGeometry(num_rows=1000, row_bytes=1 << 20)
    assert sum(end - begin for begin, end in plan_pins(alone, (0, (1 << 20) - 64), 4096)) == 1000 << 20


def test_c42_a_part_that_is_pinned_alone_passes_the_self_test_as_pinned(
    gpu: GPU, make_pool: Callable[..., Pool]
) -> None:
    from kvtier_core.transfer import self_test

    layout = said_to_be_on_a_gpu(KVLayout([torch.zeros(30, 1 << 17, dtype=torch.uint8)]))
    pool = make_pool(num_rows=40, row_bytes=(4 << 17) + 4096, num_workers=4)
    device = CUDADevice(layout, pool, 1)
    assert sum(gpu._registered.values()) == 40 << 17
    assert self_test(device, layout, pool, 1).is_pinned
    assert device.shutdown(TIMEOUT_S)


def test_c42_rows_begin_on_a_page_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 16)  # as on Grace
    geometry = PoolGeometry(num_rows=3, row_bytes=20_480, num_workers=2)
    assert geometry.rows_offset == 1 << 16
    with Pool.create(geometry) as pool:
        pool.rows_array[:] = 7
        assert pool.control.is_idle


def test_c42_pinning_follows_prefaulting(
    cuda: _Registry,
    pool: Pool,
    kv: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pages that are pinned can't be moved into huge ones. What takes long is told of."""
    go_on, before = threading.Event(), []
    waited = Pool.wait_for_prefault

    def advise(*_: object) -> None:
        assert go_on.wait(TIMEOUT_S)
        before.append(dict(cuda.registered))

    def wait_for_prefault(self: Pool, timeout_s: float) -> bool:
        is_over = waited(self, 0 if not go_on.is_set() else timeout_s)
        go_on.set()
        return is_over

    monkeypatch.setattr(prefault_module, "advise", advise)
    monkeypatch.setattr(Pool, "wait_for_prefault", wait_for_prefault)
    monkeypatch.setattr(pinning_module, "_TELL_S", 0.0)
    monkeypatch.setattr(pinning_module, "_CALL_BYTES", 1)
    pool.prefault()
    device = CUDADevice(said_to_be_on_a_gpu(KVLayout(kv)), pool)
    assert before == [{}]
    assert len(cuda.registered) == 5
    assert [thread.name for thread in cuda.threads] == ["kvtier-pin"]
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    told = list(dict.fromkeys(re.sub(r" (\(after|in) .*", "", line) for line in lines))
    pinned = [f"{8 * row}.0 KiB of 40.0 KiB of the pool are pinned" for row in range(1, 6)]
    waiting = "waiting for the pool's memory before 40.0 KiB of it are pinned"
    assert told == [waiting, *pinned, "40.0 KiB of the pool were pinned"]
    assert device.shutdown(TIMEOUT_S)


@pytest.mark.parametrize(
    ("limit", "advice"),
    [
        (
            8192,
            "may lock 8.0 KiB and needs 40.0 KiB: raise the limit (ulimit -l; docker run --ulimit memlock=-1;",
        ),
        (1 << 20, "The limit on locked memory allows 40.0 KiB: make the pool smaller"),
        (resource.RLIM_INFINITY, "make the pool smaller"),
    ],
)
def test_c42_a_refusal_says_what_to_do(
    cuda: _Registry,
    pool: Pool,
    kv: list[torch.Tensor],
    limit: int,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda.refuse_call = 1
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    device = CUDADevice(said_to_be_on_a_gpu(KVLayout(kv)), pool)
    assert "copies work, and are slower" in caplog.text
    assert advice in caplog.text
    assert device.shutdown(TIMEOUT_S)
