"""C40, C41, C42: the CUDA device's copies on a simulated GPU, and what becomes of jobs while they are under way.

Random engines, and deliberate mistakes, are in ``test_transfer_simgpu``.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from kvtier_core.transfer import CUDADevice, Direction, KVLayout, Pool, StreamDevice, open_device
from kvtier_core.transfer import cpu as cpu_module
from kvtier_core.transfer import cuda as cuda_module
from kvtier_core.transfer import streams as streams_module
from kvtier_core.transfer.plan import Numbers
from kvtier_core.transfer.streams import CopyBatch
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import (
    BLOCKS,
    DTYPES,
    LAYOUTS,
    Gate,
    one,
    payload,
    random_tensor,
    row_bytes,
    said_to_be_on_a_gpu,
)
from tests.transfer.round_trip import round_trip
from tests.transfer.simgpu.gpu import GPU, SimulatedEvent

STORE, LOAD = Direction.STORE, Direction.LOAD
MakeCUDA = Callable[..., CUDADevice]


@pytest.fixture
def make_cuda(gpu: GPU, make_pool: Callable[..., Pool]) -> Iterator[MakeCUDA]:
    """Make devices that are shut down before their pools close."""
    devices: list[CUDADevice] = []

    def make(
        layout: KVLayout, pool: Pool, worker: int = 0, copy_batch: CopyBatch | None = None, **options: Any
    ) -> CUDADevice:
        made = CUDADevice(said_to_be_on_a_gpu(layout), pool, worker, copy_batch=copy_batch, **options)
        devices.append(made)
        return made

    yield make
    for device in devices:
        assert device.shutdown(TIMEOUT_S)


@pytest.fixture
def kv() -> list[torch.Tensor]:
    return [random_tensor((10, 64), torch.uint8, seed=layer) for layer in range(2)]


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool()


@pytest.mark.parametrize(("gathers", "apart"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", range(1, 9))
def test_c41_c42_every_byte_goes_to_its_slot_and_comes_back(
    make_pool: Callable[..., Pool],
    make_cuda: MakeCUDA,
    monkeypatch: pytest.MonkeyPatch,
    factor: int,
    dtype: torch.dtype,
    gathers: bool,  # noqa: FBT001 - a parameter of the test
    apart: bool,  # noqa: FBT001
) -> None:
    monkeypatch.setattr(streams_module, "_GATHER_BELOW", (1 << 20) * gathers)
    monkeypatch.setattr(streams_module, "_STAGING_BYTES", 3000)
    round_trip(make_pool, make_cuda, factor=factor, dtype=dtype, seed=gathers, apart=apart)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make_tensors", LAYOUTS)
@pytest.mark.parametrize("by", ["torch", "batch"])
def test_c42_every_layout_gives_every_byte_back(
    gpu: GPU,
    make_pool: Callable[..., Pool],
    make_cuda: MakeCUDA,
    make_tensors: Callable[[torch.dtype], list[torch.Tensor]],
    dtype: torch.dtype,
    by: str,
) -> None:
    tensors = make_tensors(dtype)
    before = [payload(tensors, block) for block in range(BLOCKS)]
    layout = KVLayout(tensors)
    pool = make_pool(num_rows=BLOCKS, row_bytes=row_bytes(layout))
    device = make_cuda(layout, pool, copy_batch=gpu.copy_batch if by == "batch" else None)
    blocks, rows = [3, 4, 5, 9, 0, 23], [7, 8, 9, 1, 20, 0]
    device.submit(STORE, 1, one(blocks, rows))
    assert device.wait(STORE, [1], TIMEOUT_S)
    for block, row in zip(blocks, rows, strict=True):
        assert bytes(pool.row(row)[: layout.payload_bytes[0]]) == before[block]
    device.submit(LOAD, 1, one([10, 11, 12], [7, 1, 0]))
    assert device.wait(LOAD, [1], TIMEOUT_S)
    found = [payload(tensors, block) for block in range(BLOCKS)]
    assert found == [*before[:10], before[3], before[9], before[23], *before[13:]]
    assert [(result.error, result.bytes) for result in device.get_finished()] == [
        (None, count * layout.payload_bytes[0]) for count in (6, 3)
    ]


@pytest.mark.parametrize("makes_kv", [False, True])
@pytest.mark.parametrize("opens", [False, True])
def test_c42_kv_and_device_may_be_made_in_inference_mode(
    make_cuda: MakeCUDA,
    pool: Pool,
    makes_kv: bool,  # noqa: FBT001 - a parameter of the test
    opens: bool,  # noqa: FBT001
) -> None:
    with torch.inference_mode(makes_kv):
        tensors = [random_tensor((4, 64), torch.float16, seed=i) for i in range(2)]
    before = payload(tensors, 2)
    with torch.inference_mode(opens):
        device = make_cuda(KVLayout(tensors), pool)
    device.submit(STORE, 1, one([2], [0]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    device.submit(LOAD, 1, one([3], [0]))
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert [result.error for result in device.get_finished()] == [None, None]
    assert payload(tensors, 3) == before


@pytest.mark.parametrize(
    ("pages", "gathered"), [((64,), False), ((64, 64), True), ((1 << 16, 64), False), ((1 << 16,), False)]
)
def test_c42_only_several_small_pages_take_device_memory(
    make_pool: Callable[..., Pool],
    make_cuda: MakeCUDA,
    pages: tuple[int, ...],
    gathered: bool,  # noqa: FBT001
) -> None:
    device = make_cuda(
        KVLayout([torch.zeros(4, page, dtype=torch.uint8) for page in pages]), make_pool(row_bytes=1 << 17)
    )
    assert [len(staging.memory) for staging in device._staging.values()] == [32 << 20] * 2 * gathered


def test_c42_a_jobs_copies_are_one_call_of_neighbours_as_one(
    gpu: GPU, make_pool: Callable[..., Pool], make_cuda: MakeCUDA
) -> None:
    calls: list[list[int]] = []

    def note(sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
        calls.append(sizes.tolist())
        gpu.copy_batch(sources, targets, sizes)

    layout = KVLayout([random_tensor((10, 8), torch.uint8)], block_size_factor=4)
    device = make_cuda(layout, make_pool(), copy_batch=note)
    device.submit(STORE, 1, one([0, 1, 2, 3, 4, 5, 9], [0, 1]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert calls == [[32, 16, 8]]


def test_c42_the_tensors_place_chooses_the_device(
    make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []
    for module, name in (
        (cpu_module, "CPUDevice"),
        (cuda_module, "CUDADevice"),
        (streams_module, "StreamDevice"),
    ):
        monkeypatch.setattr(module, name, lambda *_, name=name: chosen.append(name))
    layout, pool = KVLayout([torch.zeros(4, 16)]), make_pool()
    for place in ("cpu", "cuda", "xpu"):
        object.__setattr__(layout, "device", torch.device(place))
        open_device(layout, pool)
    assert chosen == ["CPUDevice", "CUDADevice", "StreamDevice"]


def test_c42_an_accelerator_without_streams_is_refused_by_name(pool: Pool, kv: list[torch.Tensor]) -> None:
    layout = KVLayout(kv)
    object.__setattr__(layout, "device", torch.device("mps"))
    with pytest.raises(ValueError, match="KV on mps can not be moved: torch has no streams there"):
        StreamDevice(layout, pool)


def test_k2_o4_c40_a_store_follows_compute_and_nobody_waits_for_it(
    gpu: GPU, make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor]
) -> None:
    gate, device = Gate(), make_cuda(KVLayout(kv), pool)
    gpu.compute.launch(gate)
    gpu.compute.launch(lambda: kv[0][2].fill_(77))
    device.submit(STORE, 1, one([2], [1]))
    device.submit(STORE, 2, one([3], [2]))
    assert not device.wait(STORE, [1], 0.0)
    assert device.get_finished() == []
    assert not pool.rows_array.any()
    gate.open()
    assert device.wait(STORE, [1, 2], TIMEOUT_S)
    assert [result.job_id for result in device.get_finished()] == [1, 2]
    assert bytes(pool.row(1)[:128]) == b"\x4d" * 64 + payload(kv[1:], 2)


def test_c40_a_load_follows_compute_and_the_other_direction_does_not_wait(
    gpu: GPU, make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor]
) -> None:
    gate, device = Gate(), make_cuda(KVLayout(kv), pool)
    pool.rows_array[1] = 6
    device.submit(STORE, 1, one([3], [2]))
    gpu.compute.launch(gate)
    gpu.compute.launch(kv[0][2].zero_)  # as an engine zeroes a new block
    device.submit(LOAD, 1, one([2], [1]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert not device.wait(LOAD, [1], 0.0)
    gate.open()
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert payload(kv, 2) == b"\x06" * 128


@pytest.mark.parametrize("direction", Direction)
def test_c36_a_reset_waits_for_copies_although_nobody_asks_for_results(
    gpu: GPU, make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor], direction: Direction
) -> None:
    """C36.3: as a scheduler's process that waits while the threads of the workers have nothing to do."""
    gate, told = Gate(), threading.Event()
    device = make_cuda(KVLayout(kv), pool, on_finished=told.set)
    gpu.compute.launch(gate)
    device.submit(direction, 1, one([2], [1]))
    assert not pool.wait_for_copies(0.0)
    gate.open()
    assert pool.wait_for_copies(TIMEOUT_S)
    assert told.wait(TIMEOUT_S)
    assert [result.ok for result in device.get_finished()] == [True]


def test_c34_a_shutdown_waits_for_copies_and_drops_none(
    gpu: GPU, make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor]
) -> None:
    gate, device = Gate(), make_cuda(KVLayout(kv), pool)
    gpu.compute.launch(gate)
    device.submit(STORE, 1, one([2], [1]))
    assert not device.shutdown(0.0)
    with pytest.raises(RuntimeError, match="store job 2 was submitted after shutdown"):
        device.submit(STORE, 2, one([2], [2]))
    gate.open()
    assert device.shutdown(TIMEOUT_S)
    assert [result.ok for result in device.get_finished()] == [True]


def test_c36_a_pool_that_is_closed_under_copies_stays_mapped_and_their_job_fails(
    gpu: GPU, make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor]
) -> None:
    gate, device = Gate(), make_cuda(KVLayout(kv), pool)
    gpu.compute.launch(gate)
    device.submit(STORE, 1, one([2], [1]))
    assert not pool.close()
    gate.open()
    assert device.wait(STORE, [1], TIMEOUT_S)
    (result,) = device.get_finished()
    assert "released" in (result.error or "")


def test_c36_a_call_that_fails_half_way_fails_the_job_when_what_was_queued_is_over(
    gpu: GPU, make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "_COPIES_A_CALL", 1)
    monkeypatch.setattr(streams_module, "_GATHER_BELOW", 0)
    calls: list[int] = []

    def fail_second(sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of order")
        gpu.copy_batch(sources, targets, sizes)

    gate, device = Gate(), make_cuda(KVLayout(kv), pool, copy_batch=fail_second)
    gpu.compute.launch(gate)
    device.submit(STORE, 1, one([1], [0]))
    device.submit(STORE, 2, one([2], [1]))
    assert not device.wait(STORE, [1], 0.0)
    assert not pool.control.is_settled(STORE, 1)
    gate.open()
    assert device.wait(STORE, [1, 2], TIMEOUT_S)
    assert [result.error for result in device.get_finished()] == ["RuntimeError: out of order", None]
    assert bytes(pool.row(0)[:64]) == payload(kv[:1], 1), "its first copy was under way"
    assert bytes(pool.row(1)[:128]) == payload(kv, 2)


def test_a_job_that_is_refused_waits_its_turn_and_queues_nothing(
    gpu: GPU, make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor]
) -> None:
    gate, device = Gate(), make_cuda(KVLayout(kv), pool)
    gpu.compute.launch(gate)
    device.submit(LOAD, 1, one([0], [0]))
    device.submit(LOAD, 2, one([10], [1]))
    assert device.get_finished() == []
    gate.open()
    assert device.wait(LOAD, [1, 2], TIMEOUT_S)
    errors = [result.error for result in device.get_finished()]
    assert errors == [None, "ValueError: block 10 is outside 0..9"]


@pytest.mark.parametrize("asks", [False, True])
def test_c36_copies_that_cuda_gives_up_fail_their_job(
    gpu: GPU,
    make_cuda: MakeCUDA,
    pool: Pool,
    kv: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    asks: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    def raise_error(_: SimulatedEvent) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device = make_cuda(KVLayout(kv), pool)
    with monkeypatch.context() as broken:
        broken.setattr(SimulatedEvent, "synchronize", raise_error)
        broken.setattr(SimulatedEvent, "query", raise_error)
        device.submit(STORE, 1, one([2], [1]))
        results = device.get_finished() if asks else []
        assert device.wait(STORE, [1], TIMEOUT_S)
        results += device.get_finished()
    assert [result.error for result in results] == [
        "RuntimeError: CUDA error: an illegal memory access was encountered"
    ]
    assert pool.control.is_settled(STORE, 1)
    device.submit(STORE, 2, one([2], [1]))
    assert device.wait(STORE, [2], TIMEOUT_S)
    assert [result.ok for result in device.get_finished()] == [True]


def test_c42_the_drivers_call_gets_its_arguments_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's call copies at once here, as it reads its arguments in C."""
    source, target = (np.arange(16, dtype=np.uint8), np.zeros(16, dtype=np.uint8))
    seen: list[Any] = []

    @ctypes.CFUNCTYPE(
        ctypes.c_int,
        *[ctypes.POINTER(ctypes.c_int64)] * 3,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
    )
    def driver(*arguments):
        targets, sources, sizes, count, attributes, firsts, num_attributes, failed, stream = arguments
        seen.append((count, attributes[:6], firsts[0], num_attributes, stream))
        if count == 1:
            failed[0] = 0
            return 801
        for place in range(count):
            ctypes.memmove(targets[place], sources[place], sizes[place])
        return 0

    # As a function of a library: ctypes knows nothing of its arguments.
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(driver, ctypes.c_void_p).value or 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(cuMemcpyBatchAsync=call))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=4711))
    copy_batch = cuda_module.find_driver_batch()
    assert copy_batch is not None
    places = np.array([0, 8])
    copy_batch(source.ctypes.data + places, target.ctypes.data + places[::-1], np.array([8, 3]))
    assert target.tolist() == [8, 9, 10, 0, 0, 0, 0, 0, *range(8)]
    assert seen == [(2, [1, 0, 0, 0, 0, 0], 0, 1, 4711)]
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync: error 801 at copy 0 of 1, of 3 bytes in all"):
        copy_batch(source.ctypes.data + places[:1], target.ctypes.data + places[:1], np.array([3]))


def _cpu_seconds(threads: Sequence[threading.Thread]) -> float:
    """What they have computed since they began, and this thread as well."""
    found = time.thread_time()
    for thread in threads:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
        found += (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime
    return found


def test_c40_a_worker_that_waits_for_ten_seconds_of_compute_sleeps(
    gpu: GPU, make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor]
) -> None:
    others = threading.enumerate()  # earlier tests may have left some that hang on purpose
    device = make_cuda(KVLayout(kv), pool)
    new = [thread for thread in threading.enumerate() if thread not in others]
    lanes = [thread for thread in new if thread.name.startswith("kvtier-")]
    assert len(lanes) == 2
    gpu.compute.launch(partial(time.sleep, 10))
    before = _cpu_seconds(lanes)
    device.submit(STORE, 1, one([1], [1]))
    device.submit(LOAD, 1, one([2], [2]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert min(result.seconds for result in device.get_finished()) >= 0
    assert _cpu_seconds(lanes) - before < 0.5


def test_c40_events_are_cudas_own_which_can_block(
    make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor]
) -> None:
    """``torch.Event`` takes ``blocking`` and ignores it."""
    event = make_cuda(KVLayout(kv), pool)._event()
    assert type(event) is torch.cuda.Event
    assert vars(event)["blocking"]


def test_c42_a_call_for_copies_is_of_8192_at_most(gpu: GPU, make_pool: Callable[..., Pool]) -> None:
    """ROCm faults above. Its own call takes no attributes, so that none are handed over."""
    calls = []

    def copy_batch(*arrays: Numbers) -> None:
        calls.append([len(array) for array in arrays])
        gpu.copy_batch(*arrays)

    kv = [torch.zeros(300, 64, dtype=torch.uint8) for _ in range(60)]
    layout = said_to_be_on_a_gpu(KVLayout(kv))
    pool = make_pool(num_rows=300, row_bytes=row_bytes(layout))
    pool.rows_array[:] = 3
    with patch.object(streams_module, "_GATHER_BELOW", 0):
        device = CUDADevice(layout, pool, copy_batch=copy_batch)
    device.submit(LOAD, 1, one(range(300), range(300)))
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert all(bool((tensor == 3).all()) for tensor in kv)
    assert calls == [[8192] * 3, [8192] * 3, [300 * 60 - 2 * 8192] * 3]
    assert device.shutdown(TIMEOUT_S)


def test_c42_without_nvidias_driver_there_is_no_call_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch copies on ROCm then, whose ``hipMemcpyBatchAsync`` faults with attributes."""

    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert cuda_module.find_driver_batch() is None


def test_nothing_is_allocated_while_serving(
    gpu: GPU, make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither pinned memory, which stops a GPU for a moment, nor memory of the device, which is the engine's."""
    made = []

    def count(name: str, owner: Any = torch) -> Callable[..., torch.Tensor]:
        real = getattr(owner, name)

        def make(*arguments: Any, **options: Any) -> torch.Tensor:
            made.append(name)
            tensor: torch.Tensor = real(*arguments, **options)
            return tensor

        return make

    kv = [torch.zeros(40, 64, dtype=torch.uint8) for _ in range(3)]
    layout = said_to_be_on_a_gpu(KVLayout(kv))
    pool = make_pool(num_rows=40)
    monkeypatch.setattr(streams_module, "_IDS", 8)
    device = CUDADevice(layout, pool)
    assert device._staging
    for name in ("empty", "zeros", "tensor"):
        monkeypatch.setattr(torch, name, count(name))
    for name in ("pin_memory", "to"):
        monkeypatch.setattr(torch.Tensor, name, count(name, torch.Tensor))
    for job in range(1, 20):
        for direction in Direction:
            device.submit(direction, job, one(range(job % 2, 40, 2), range(job % 2, 40, 2)))
    for direction in Direction:
        assert device.wait(direction, [19], TIMEOUT_S)
    assert [result.error for result in device.get_finished()] == [None] * 38
    assert made == []
    assert device.shutdown(TIMEOUT_S)
