"""The CPU device: bytes, order, waiting, dropping, failing, and shutting down."""

import gc
import inspect
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtier_core.transfer import (
    CPUDevice,
    Device,
    Direction,
    KVLayout,
    Pool,
    TransferResult,
)
from kvtier_core.transfer import cpu as cpu_module
from kvtier_core.transfer.plan import Runs
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import BLOCKS, DTYPES, LAYOUTS, Gate, after, one, payload, random_tensor, row_bytes

MakePool = Callable[..., Pool]
MakeDevice = Callable[..., CPUDevice]

STORE, LOAD = Direction.STORE, Direction.LOAD


@pytest.fixture
def small() -> list[torch.Tensor]:
    return [random_tensor((BLOCKS, 1024), torch.float32, seed=layer) for layer in range(2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make_tensors", LAYOUTS)
def test_c42_a_store_and_a_load_give_every_byte_back(
    make_pool: MakePool,
    make_device: MakeDevice,
    make_tensors: Callable[[torch.dtype], list[torch.Tensor]],
    dtype: torch.dtype,
) -> None:
    tensors = make_tensors(dtype)
    before = [payload(tensors, block) for block in range(BLOCKS)]
    layout = KVLayout(tensors)
    pool = make_pool(num_rows=BLOCKS, row_bytes=row_bytes(layout))
    device = make_device(layout, pool)
    chance = random.Random(str(dtype))
    stored = chance.sample(range(BLOCKS), 15)
    stored.sort(key=lambda block: block % 3)  # some neighbours stay together
    rows = chance.sample(range(BLOCKS), 15)

    device.submit(STORE, 1, one(stored, rows))
    assert device.wait(STORE, [1], TIMEOUT_S)
    for block, row in zip(stored, rows, strict=True):
        assert bytes(pool.row(row)[: layout.payload_bytes[0]]) == before[block]
    for row in set(range(BLOCKS)) - set(rows):
        assert not pool.rows_array[row].any(), "a row outside the job was written"

    # Load them into other blocks than they came from; the rest must not change.
    loaded = chance.sample(range(BLOCKS), 15)
    device.submit(LOAD, 1, one(loaded, rows))
    assert device.wait(LOAD, [1], TIMEOUT_S)
    for origin, block in zip(stored, loaded, strict=True):
        assert payload(tensors, block) == before[origin]
    for block in set(range(BLOCKS)) - set(loaded):
        assert payload(tensors, block) == before[block], "a block outside the job was written"
    results = device.get_finished()
    assert [(result.direction, result.ok, result.bytes) for result in results] == [
        (STORE, True, 15 * layout.payload_bytes[0]),
        (LOAD, True, 15 * layout.payload_bytes[0]),
    ]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each transfer was shared with a second thread, as it is carried out."""
    seen: list[bool] = []
    is_shared = CPUDevice._is_shared

    def noted(device: CPUDevice, plan: dict[int, Runs], calls: int) -> bool:
        seen.append(is_shared(device, plan, calls))
        return seen[-1]

    monkeypatch.setattr(CPUDevice, "_is_shared", noted)
    return seen


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("processors", "expected"), [(8, True), (2, True), (1, False)])
@pytest.mark.parametrize("layers", [1, 3, 16])
def test_a_large_transfer_is_shared_where_there_are_two_processors(
    make_pool: MakePool,
    make_device: MakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    shared: list[bool],
    direction: Direction,
    processors: int,
    expected: bool,  # noqa: FBT001 - a parameter of the test
    layers: int,
) -> None:
    page = (1 << 20) // layers
    tensors = [random_tensor((24, page), torch.uint8, seed=layer) for layer in range(layers)]
    pool = make_pool(num_rows=24, row_bytes=(1 << 20) + 4096)
    pool.rows_array[:] = 2
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(processors))
    device = make_device(KVLayout(tensors), pool)
    device.submit(direction, 1, one(range(24), range(24)))
    device.submit(direction, 2, one(range(7), range(7)))
    assert device.wait(direction, [1, 2], TIMEOUT_S)
    assert shared == [expected, False], "7 MiB are not worth a second thread"
    for block in range(24):
        stored = bytes(pool.row(block)[: layers * page])
        assert stored == payload(tensors, block)
        assert stored != b"\2" * len(stored) or direction is LOAD


def test_a_transfer_of_small_pieces_is_not_shared(
    make_pool: MakePool, make_device: MakeDevice, shared: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(2))
    device = make_device(
        KVLayout([torch.ones(4096, 4096, dtype=torch.uint8)]), make_pool(num_rows=4096, row_bytes=8192)
    )
    scattered = list(range(0, 4096, 2)) + list(range(1, 4096, 2))
    device.submit(STORE, 1, one(scattered, range(4096)))
    device.submit(STORE, 2, one(range(4096), range(4096)))  # as large, in one piece
    assert device.wait(STORE, [1, 2], TIMEOUT_S)
    assert shared == [False, True]


def test_a_helper_that_is_busy_with_another_copy_is_not_waited_for(
    make_pool: MakePool, make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(2))
    tensors = [random_tensor((12, 1 << 20), torch.uint8)]
    pool = make_pool(num_rows=12, row_bytes=(1 << 20) + 4096)
    device = make_device(KVLayout(tensors), pool)
    gate = Gate()
    device._helper.submit(gate)
    assert gate.reached.wait(TIMEOUT_S)
    device.submit(STORE, 1, one(range(12), range(12)))
    assert device.wait(STORE, [1], TIMEOUT_S)
    gate.open()
    assert [bytes(pool.row(block)[: 1 << 20]) for block in range(12)] == [
        payload(tensors, block) for block in range(12)
    ]


@pytest.mark.parametrize("who", ["own", "helper"])
def test_a_copy_that_fails_on_either_thread_fails_the_job_and_nothing_stays_mapped(
    make_pool: MakePool, make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """The pool can be closed at the end without the garbage collector."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(2))
    pool = make_pool(num_rows=12, row_bytes=(1 << 20) + 4096)
    device = make_device(KVLayout([torch.ones(12, 1 << 20, dtype=torch.uint8)]), pool)
    carry_out, both = cpu_module._carry_out, threading.Barrier(2)

    def fail(copies: Any) -> None:
        both.wait(TIMEOUT_S)
        if threading.current_thread().name.startswith("kvtier-copy") == (who == "helper"):
            raise OSError("a part failed")
        carry_out(copies)

    monkeypatch.setattr(cpu_module, "_carry_out", fail)
    gc.collect()
    gc.disable()
    try:
        device.submit(STORE, 1, one(range(12), range(12)))
        assert device.wait(STORE, [1], TIMEOUT_S)
        (result,) = device.get_finished()
        assert device.shutdown(TIMEOUT_S)
        assert pool.close()
    finally:
        gc.enable()
    assert (result.ok, result.error) == (False, "OSError: a part failed")


def test_a_store_leaves_the_rest_of_the_row_alone(
    make_pool: MakePool, make_device: MakeDevice, small: list[torch.Tensor]
) -> None:
    pool = make_pool(row_bytes=12288)
    pool.rows_array[:] = 5
    device = make_device(KVLayout(small), pool)
    device.submit(STORE, 1, one([3], [2]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert bytes(pool.row(2)) == payload(small, 3) + b"\x05" * 4096


def test_c43_each_worker_fills_its_own_slice(
    make_pool: MakePool, make_device: MakeDevice, small: list[torch.Tensor]
) -> None:
    pool = make_pool(row_bytes=20480, num_workers=2)
    other = [random_tensor((BLOCKS, 1024), torch.float32, seed=9 + layer) for layer in range(2)]
    devices = [make_device(KVLayout(small), pool, 0), make_device(KVLayout(other), pool, 1)]
    devices[1].submit(STORE, 1, one([4], [0]))
    assert devices[1].wait(STORE, [1], TIMEOUT_S)
    assert not pool.control.is_settled(STORE, 1)
    devices[0].submit(STORE, 1, one([4], [0]))
    assert devices[0].wait(STORE, [1], TIMEOUT_S)
    assert pool.control.is_settled(STORE, 1)
    assert bytes(pool.row(0)[:16384]) == payload(small, 4) + payload(other, 4)


def test_c42_the_cpu_device_has_the_devices_interface(
    make_pool: MakePool, make_device: MakeDevice, small: list[torch.Tensor]
) -> None:
    device: Device = make_device(KVLayout(small), make_pool(row_bytes=12288))
    for name, method in inspect.getmembers(Device, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(type(device), name)) == inspect.signature(method), name


@pytest.fixture
def pool(make_pool: MakePool) -> Pool:
    return make_pool(row_bytes=12288)


@pytest.fixture
def device(make_device: MakeDevice, pool: Pool, small: list[torch.Tensor]) -> CPUDevice:
    return make_device(KVLayout(small), pool)


def test_c40_a_store_waits_for_its_compute(device: CPUDevice, pool: Pool, small: list[torch.Tensor]) -> None:
    gate = Gate()
    after(gate, device, STORE, 1, one([7], [0]))
    assert gate.reached.wait(TIMEOUT_S)
    small[0][7] = 1.5  # the compute writes the block while the store is already queued
    small[1][7] = 2.5
    assert device.get_finished() == []
    assert not pool.rows_array.any()
    gate.open()
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert bytes(pool.row(0)[:8192]) == payload(small, 7)


def test_c40_a_load_follows_the_compute_queued_before_it(
    device: CPUDevice, pool: Pool, small: list[torch.Tensor]
) -> None:
    gate = Gate()
    pool.rows_array[6] = 77
    after(gate, device, LOAD, 1, one([3], [6]))
    assert gate.reached.wait(TIMEOUT_S)
    for tensor in small:
        tensor[3] = 0.0  # as an engine zeroes a new block
    gate.open()
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert payload(small, 3) == bytes([77]) * 8192


def test_c40_a_loads_bytes_are_there_when_its_result_is(
    make_device: MakeDevice, pool: Pool, small: list[torch.Tensor]
) -> None:
    seen: list[bytes] = []
    told = threading.Event()

    def look() -> None:
        seen.append(payload(small, 3))
        told.set()

    device = make_device(KVLayout(small), pool, 0, look)
    pool.rows_array[6] = 77
    device.submit(LOAD, 1, one([3], [6]))
    assert told.wait(TIMEOUT_S)
    assert seen == [bytes([77]) * 8192]
    assert [result.ok for result in device.get_finished()] == [True]


def test_c40_jobs_of_one_direction_complete_in_order_and_the_other_does_not_wait(device: CPUDevice) -> None:
    gate = Gate()
    after(gate, device, STORE, 1, one([0], [0]))
    for job_id in range(2, 9):
        device.submit(STORE, job_id, one([job_id], [job_id - 1]))
    device.submit(LOAD, 1, one([20], [7]))
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert [(result.direction, result.job_id) for result in device.get_finished()] == [(LOAD, 1)]
    gate.open()
    assert device.wait(STORE, range(1, 9), TIMEOUT_S)
    assert [result.job_id for result in device.get_finished()] == list(range(1, 9))


def test_c40_submitting_does_not_wait_for_the_copy(device: CPUDevice) -> None:
    gate = Gate()
    after(gate, device, STORE, 1, one([0], [0]))
    assert not device.wait(STORE, [1], 0.0)
    gate.open()
    assert device.wait(STORE, [1], TIMEOUT_S)


def test_a_compute_that_fails_fails_its_store_and_moves_nothing(device: CPUDevice, pool: Pool) -> None:
    def fail() -> None:
        raise RuntimeError("compute broke")

    after(fail, device, STORE, 1, one([0], [0]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    (result,) = device.get_finished()
    assert (result.ok, result.dropped, result.error) == (False, False, "RuntimeError: compute broke")
    assert not pool.rows_array.any()
    assert pool.control.is_settled(STORE, 1)


def test_k4_o1_waiting_for_a_store_makes_the_reuse_of_its_block_safe(
    device: CPUDevice, pool: Pool, small: list[torch.Tensor]
) -> None:
    old = payload(small, 7)
    gate = Gate()
    after(gate, device, STORE, 1, one([7], [2]))
    assert gate.reached.wait(TIMEOUT_S)
    done_first: list[bool] = []

    def preempt_and_reuse() -> None:
        assert device.wait(STORE, [1], TIMEOUT_S)
        done_first.append(pool.control.is_settled(STORE, 1))
        for tensor in small:
            tensor[7] = -1.0

    engine = threading.Thread(target=preempt_and_reuse)
    engine.start()
    assert payload(small, 7) == old, "the block was reused while its store was in flight"
    gate.open()
    engine.join(TIMEOUT_S)
    assert done_first == [True]
    assert bytes(pool.row(2)[:8192]) == old
    assert payload(small, 7) != old


@pytest.mark.parametrize(
    ("block_ids", "rows", "error"),
    [
        ([0, BLOCKS], [0, 1], "ValueError: block 24 is outside 0..23"),
        ([0, 1], [0, 8], "ValueError: row 8 is outside 0..7"),
        ([0, -1], [0, 1], "ValueError: block -1 is outside 0..23"),
        ([0, 1, 2], [0, 1], "ValueError: 3 blocks but 2 rows"),
        (
            [0, 0.5],
            [0, 1],
            "TypeError: block ids, rows, groups and slots must be whole numbers of 64 bits, not 0.5",
        ),
    ],
)
@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_bad_ids_fail_the_job_before_a_byte_moves_and_the_next_job_works(
    device: CPUDevice,
    pool: Pool,
    small: list[torch.Tensor],
    direction: Direction,
    block_ids: list[int],
    rows: list[int],
    error: str,
) -> None:
    pool.rows_array[:] = 3
    before = [payload(small, block) for block in range(BLOCKS)]
    device.submit(direction, 1, one(block_ids, rows))
    assert device.wait(direction, [1], TIMEOUT_S)
    (result,) = device.get_finished()
    assert (result.ok, result.dropped, result.error) == (False, False, error)
    assert (pool.rows_array == 3).all()
    assert [payload(small, block) for block in range(BLOCKS)] == before
    assert pool.control.is_settled(direction, 1)
    device.submit(direction, 2, one([0], [0]))
    assert device.wait(direction, [2], TIMEOUT_S)
    assert device.get_finished()[0].ok


def test_a_transfer_of_nothing_is_fine(device: CPUDevice) -> None:
    device.submit(STORE, 1, one([], []))
    assert device.wait(STORE, [1], TIMEOUT_S)
    (result,) = device.get_finished()
    assert (result.ok, result.bytes) == (True, 0)


def test_each_result_comes_once(device: CPUDevice) -> None:
    device.submit(STORE, 1, one([0], [0]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert len(device.get_finished()) == 1
    assert device.get_finished() == []
    assert device.wait(STORE, [1], 0.0), "a collected job counts as ended"


def test_job_ids_must_grow_also_past_those_of_an_earlier_device(
    make_device: MakeDevice, device: CPUDevice, pool: Pool, small: list[torch.Tensor]
) -> None:
    device.submit(STORE, 5, one([0], [0]))
    with pytest.raises(ValueError, match="store job 5 of worker 0 is not above its last, 5"):
        device.submit(STORE, 5, one([0], [0]))
    assert device.wait(STORE, [5], TIMEOUT_S)
    assert device.shutdown(TIMEOUT_S)
    restarted = make_device(KVLayout(small), pool)
    with pytest.raises(ValueError, match="store job 4 of worker 0 is not above its last, 5"):
        restarted.submit(STORE, 4, one([0], [0]))
    restarted.submit(LOAD, 1, one([0], [0]))
    assert restarted.wait(LOAD, [1], TIMEOUT_S)


def test_a_callback_that_raises_costs_a_log_line_only(
    make_device: MakeDevice, pool: Pool, small: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []

    def raise_error() -> None:
        told.append(1)
        raise RuntimeError("callback broke")

    device = make_device(KVLayout(small), pool, 0, raise_error)
    for job_id in (1, 2):
        device.submit(STORE, job_id, one([0], [0]))
    assert device.wait(STORE, [1, 2], TIMEOUT_S)
    assert [result.ok for result in device.get_finished()] == [True, True]
    assert device.shutdown(TIMEOUT_S)
    assert len(told) == 2
    assert "callback broke" in caplog.text


def test_c34_shutdown_drops_what_is_queued_and_may_be_called_again(device: CPUDevice, pool: Pool) -> None:
    gate = Gate()
    after(gate, device, STORE, 1, one([0], [0]))
    device.submit(STORE, 2, one([1], [1]))
    assert gate.reached.wait(TIMEOUT_S)
    assert not device.shutdown(0.0), "a store still waits for its compute"
    with pytest.raises(RuntimeError, match="store job 3 was submitted after shutdown"):
        device.submit(STORE, 3, one([2], [2]))
    gate.open()
    assert device.shutdown(TIMEOUT_S)
    assert device.shutdown(0.0)
    results = device.get_finished()
    assert [(result.job_id, result.ok, result.dropped) for result in results] == [
        (1, False, True),
        (2, False, True),
    ]
    assert not pool.rows_array.any()
    assert pool.control.is_settled(STORE, 2)
    assert pool.close(), "the device still holds the pool"


def test_an_idle_device_ends_its_threads(
    make_device: MakeDevice, pool: Pool, small: list[torch.Tensor]
) -> None:
    before = set(threading.enumerate())  # other tests may have left some that hang on purpose
    device = make_device(KVLayout(small), pool)
    its_own = set(threading.enumerate()) - before
    assert its_own
    assert device.shutdown(TIMEOUT_S)
    assert not its_own & set(threading.enumerate())


def test_a_pool_closed_too_early_takes_no_jobs(device: CPUDevice, pool: Pool) -> None:
    assert not pool.close(), "the device maps the rows"
    with pytest.raises(ValueError, match="released"):
        device.submit(STORE, 1, one([0], [0]))
    assert device.wait(STORE, [1], 0.0)
    assert device.get_finished() == []


def test_many_jobs_from_many_threads_all_get_their_result(device: CPUDevice) -> None:
    lock, results, last = threading.Lock(), [], 0

    def submit_some() -> None:
        nonlocal last
        for _ in range(100):
            with lock:
                last += 1
                device.submit(STORE, last, one([last % BLOCKS], [last % 8]))
            collected: list[TransferResult] = device.get_finished()
            with lock:
                results.extend(collected)

    threads = [threading.Thread(target=submit_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert device.wait(STORE, range(1, 401), TIMEOUT_S)
    results.extend(device.get_finished())
    assert sorted(result.job_id for result in results) == list(range(1, 401))


FAR_APART = """
import mmap
import torch
from kvtier_core.transfer import CPUDevice, Direction, GroupTransfer, KVLayout, Pool, PoolGeometry

def tensor(number):
    memory = mmap.mmap(-1, 4 << 20)
    memory[:] = bytes([number]) * len(memory)
    return torch.frombuffer(memory, dtype=torch.uint8).view(4, -1)

# The kernel lays mappings one below the other: the pool, and a large hole, end up between the tensors.
above = tensor(1)
pool = Pool.create(PoolGeometry(num_rows=4, row_bytes=(2 << 20) + 4096))
hole = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
below = tensor(2)
hole.close()
assert below.data_ptr() < pool.address < above.data_ptr(), "the kernel lays mappings out differently here"

device = CPUDevice(KVLayout([above, below]), pool)
device.submit(Direction.STORE, 1, [GroupTransfer(block_ids=[0, 1, 2], rows=[1, 2, 3])])
assert device.wait(Direction.STORE, [1], 60)
assert pool.rows_array[1:, : 1 << 20].min() == pool.rows_array[1:, : 1 << 20].max() == 1
assert pool.rows_array[1:, 1 << 20 : 2 << 20].min() == pool.rows_array[1:, 1 << 20 : 2 << 20].max() == 2
print("stored")
"""


def test_c42_tensors_on_both_sides_of_the_pool_are_stored() -> None:
    """numpy took them for overlapping with the pool, copied, took the copy for overlapping, and overran the stack."""
    program = [sys.executable, "-c", FAR_APART]
    done = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "stored\n"), done.stderr
