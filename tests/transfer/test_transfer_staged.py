"""C42: the copies of a GPU, all but the streams, over tensors in host memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from kvtier_core.transfer import Direction, GroupTransfer, KVLayout, Pool, StagedDevice, open_device
from kvtier_core.transfer import cpu as cpu_module
from kvtier_core.transfer import cuda as cuda_module
from kvtier_core.transfer import staged as staged_module
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import BLOCKS, DTYPES, LAYOUTS, one, payload, random_tensor, row_bytes
from tests.transfer.round_trip import round_trip

STORE, LOAD = Direction.STORE, Direction.LOAD
MakeStaged = Callable[..., StagedDevice]


@pytest.fixture
def make_staged() -> Iterator[MakeStaged]:
    devices: list[StagedDevice] = []

    def make(layout: KVLayout, pool: Pool, worker: int = 0, staging_bytes: int = 3000) -> StagedDevice:
        devices.append(StagedDevice(layout, pool, worker, staging_bytes=staging_bytes))
        return devices[-1]

    yield make
    for device in devices:
        assert device.shutdown(TIMEOUT_S)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", range(1, 9))
def test_c41_c42_every_byte_passes_the_staging_buffer_to_its_slot_and_back(
    make_pool: Callable[..., Pool], make_staged: MakeStaged, factor: int, dtype: torch.dtype, seed: int
) -> None:
    round_trip(make_pool, make_staged, factor=factor, dtype=dtype, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make_tensors", LAYOUTS)
@pytest.mark.parametrize("staging_bytes", [0, 2 << 20, 1 << 30])
def test_c42_every_layout_gives_every_byte_back(
    make_pool: Callable[..., Pool],
    make_staged: MakeStaged,
    make_tensors: Callable[[torch.dtype], list[torch.Tensor]],
    dtype: torch.dtype,
    staging_bytes: int,
) -> None:
    tensors = make_tensors(dtype)
    before = [payload(tensors, block) for block in range(BLOCKS)]
    layout = KVLayout(tensors)
    pool = make_pool(num_rows=BLOCKS, row_bytes=row_bytes(layout))
    device = make_staged(layout, pool, staging_bytes=min(staging_bytes, 64 << 20))
    blocks, rows = [3, 4, 5, 9, 0, 23], [7, 8, 9, 1, 20, 0]
    device.submit(STORE, 1, one(blocks, rows))
    assert device.wait(STORE, [1], TIMEOUT_S)
    for block, row in zip(blocks, rows, strict=True):
        assert bytes(pool.row(row)[: layout.payload_bytes[0]]) == before[block]
    device.submit(LOAD, 1, one([10, 11, 12], [7, 1, 0]))
    assert device.wait(LOAD, [1], TIMEOUT_S)
    found = [payload(tensors, block) for block in range(BLOCKS)]
    assert found == [*before[:10], before[3], before[9], before[23], *before[13:]]
    assert [result.error for result in device.get_finished()] == [None, None]


@pytest.mark.parametrize("makes_kv", [False, True])
@pytest.mark.parametrize("opens", [False, True])
def test_c42_kv_and_device_may_be_made_in_inference_mode(
    make_pool: Callable[..., Pool],
    make_staged: MakeStaged,
    makes_kv: bool,  # noqa: FBT001 - a parameter of the test
    opens: bool,  # noqa: FBT001
) -> None:
    with torch.inference_mode(makes_kv):
        tensors = [random_tensor((4, 64), torch.float16, seed=i) for i in range(2)]
    before = payload(tensors, 2)
    with torch.inference_mode(opens):
        device = make_staged(KVLayout(tensors), make_pool())
    device.submit(STORE, 1, one([2], [0]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    device.submit(LOAD, 1, one([3], [0]))
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert [result.error for result in device.get_finished()] == [None, None]
    assert payload(tensors, 3) == before


def test_c40_ids_cross_once_a_transfer(make_pool: Callable[..., Pool], make_staged: MakeStaged) -> None:
    crossed: list[list[int]] = []

    class Counting(StagedDevice):
        def _to_device(self, numbers: torch.Tensor) -> torch.Tensor:
            crossed.append(numbers.tolist())
            return super()._to_device(numbers)

    groups = [[random_tensor((6, 40), torch.uint8, seed=i)] for i in range(2)]
    pool = make_pool()
    device = Counting(KVLayout(*groups), pool, staging_bytes=0)  # a batch a block
    parts = [
        GroupTransfer(group=i, block_ids=[5, 1, 3], rows=[3 * i, 3 * i + 1, 3 * i + 2]) for i in range(2)
    ]
    device.submit(STORE, 1, parts)
    assert device.wait(STORE, [1], TIMEOUT_S)
    device.submit(STORE, 2, [])
    assert device.wait(STORE, [2], TIMEOUT_S)
    assert [result.error for result in device.get_finished()] == [None, None]
    assert crossed == [[5, 1, 3, 5, 1, 3]]
    for i, tensors in enumerate(groups):
        rows = [bytes(pool.row(3 * i + j)[:40]) for j in range(3)]
        assert rows == [payload(tensors, block) for block in (5, 1, 3)]
    assert device.shutdown(TIMEOUT_S)


def test_c42_the_tensors_place_chooses_the_device(
    make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []
    for module, name in (
        (cpu_module, "CPUDevice"),
        (cuda_module, "CUDADevice"),
        (staged_module, "StagedDevice"),
    ):
        monkeypatch.setattr(module, name, lambda *_, name=name: chosen.append(name))
    layout, pool = KVLayout([torch.zeros(4, 16)]), make_pool()
    for place in ("cpu", "cuda", "xpu"):
        object.__setattr__(layout, "device", torch.device(place))
        open_device(layout, pool)
    assert chosen == ["CPUDevice", "CUDADevice", "StagedDevice"]


@pytest.mark.parametrize("direction", Direction)
def test_c40_without_streams_the_device_is_waited_for_before_and_after(
    make_pool: Callable[..., Pool],
    make_staged: MakeStaged,
    monkeypatch: pytest.MonkeyPatch,
    direction: Direction,
) -> None:
    pool, tensor = make_pool(), torch.ones(4, 16)
    pool.rows_array[1] = 7
    device = make_staged(KVLayout([tensor]), pool)
    seen: list[tuple[bool, bool]] = []

    def look(place: torch.device) -> None:
        assert place == tensor.device, "another one than the current may be meant"
        seen.append((bool(pool.rows_array[0].any()), bool((tensor[3] != 1).any())))

    monkeypatch.setattr(torch.cpu, "synchronize", look)
    if direction is STORE:
        device.submit(STORE, 1, one([2], [0]))
    else:
        device.submit(LOAD, 1, one([3], [1]))
    assert device.wait(direction, [1], TIMEOUT_S)
    assert seen == [(False, False), (direction is STORE, direction is LOAD)]


def test_c36_a_copy_that_fails_half_way_is_settled_before_the_job_counts_as_finished(
    make_pool: Callable[..., Pool],
) -> None:
    order: list[str] = []

    class Recording(StagedDevice):
        def _on(self, direction: Direction) -> AbstractContextManager[object]:
            @contextmanager
            def queue() -> Iterator[None]:
                order.append(f"on {direction.value}")
                yield
                order.append("off")

            return queue()

        def _settle(self, direction: Direction) -> None:
            order.append(f"settled, job {pool.control.get_last_finished(0, direction)} finished")

        def _row(self, *args: object) -> torch.Tensor:
            raise RuntimeError("out of order")

    pool = make_pool()
    device = Recording(KVLayout([torch.zeros(4, 16)]), pool)
    order.clear()
    device.submit(STORE, 5, [GroupTransfer(block_ids=[1], rows=[0])])
    assert device.wait(STORE, [5], TIMEOUT_S)
    assert [result.error for result in device.get_finished()] == ["RuntimeError: out of order"]
    assert order == ["on store", "settled, job 0 finished"]
    assert pool.control.get_last_finished(0, STORE) == 5
    assert device.shutdown(TIMEOUT_S)
