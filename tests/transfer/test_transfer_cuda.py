"""The CUDA device on a real GPU. Needs torch, numpy and pytest only: ``nox -s gpu`` runs it on a bare GPU machine."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from kvtier_core.transfer import CUDADevice, Direction, KVLayout, Pool
from kvtier_core.transfer import cuda as cuda_module
from kvtier_core.transfer import streams as streams_module
from kvtier_core.transfer.pinning import PinnedRows
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import DTYPES, one, payload
from tests.transfer.round_trip import round_trip

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU that torch can use as a CUDA device"
)

STORE, LOAD = Direction.STORE, Direction.LOAD
_ROUNDS = 200
_SLOW_CYCLES = 2_000_000  # about a millisecond
MakeCUDA = Callable[..., CUDADevice]


@pytest.fixture
def make_cuda() -> Iterator[MakeCUDA]:
    devices: list[CUDADevice] = []

    def make(layout: KVLayout, pool: Pool, worker: int = 0) -> CUDADevice:
        devices.append(CUDADevice(layout, pool, worker))
        return devices[-1]

    yield make
    for device in devices:
        assert device.shutdown(TIMEOUT_S)


@pytest.fixture
def kv() -> list[torch.Tensor]:
    return [torch.zeros(8, 2048, dtype=torch.uint8, device="cuda") for _ in range(3)]


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool()


@pytest.mark.parametrize(
    ("seed", "gather_below", "call"),
    [(0, 1 << 20, "driver"), (1, 0, "driver"), (2, 1 << 20, "torch"), (3, 0, "torch")],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", range(1, 9))
def test_c41_c42_every_byte_goes_to_its_slot_and_comes_back(
    make_pool: Callable[..., Pool],
    make_cuda: MakeCUDA,
    monkeypatch: pytest.MonkeyPatch,
    factor: int,
    dtype: torch.dtype,
    seed: int,
    gather_below: int,
    call: str,
) -> None:
    monkeypatch.setattr(streams_module, "_GATHER_BELOW", gather_below)
    monkeypatch.setattr(streams_module, "_STAGING_BYTES", 3000)
    if call == "torch":
        monkeypatch.setattr(cuda_module, "find_driver_batch", lambda: None)
    round_trip(make_pool, make_cuda, factor=factor, dtype=dtype, seed=seed, place="cuda", apart=seed == 3)


def test_c42_rows_are_pinned(make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor]) -> None:
    assert make_cuda(KVLayout(kv), pool)._pinned._addresses
    assert torch.from_numpy(pool.rows_array).is_pinned()


def test_k2_o4_c40_a_store_issued_at_once_holds_what_the_compute_wrote_last(
    make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor]
) -> None:
    device = make_cuda(KVLayout(kv), pool)
    for round_ in range(1, _ROUNDS + 1):
        value = round_ % 255 + 1
        for tensor in kv:
            tensor[2].fill_(0)
        torch.cuda._sleep(_SLOW_CYCLES)
        for tensor in kv:
            tensor[2].fill_(value)
        device.submit(STORE, round_, one([2], [1]))
        assert device.wait(STORE, [round_], TIMEOUT_S)
        assert bytes(pool.row(1)[: 3 * 2048]) == bytes([value]) * 3 * 2048, f"round {round_}"


def test_c40_a_load_comes_after_the_compute_queued_before_it(
    make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor]
) -> None:
    device = make_cuda(KVLayout(kv), pool)
    for round_ in range(1, _ROUNDS + 1):
        value = round_ % 255 + 1
        pool.rows_array[4] = value
        torch.cuda._sleep(_SLOW_CYCLES)
        for tensor in kv:
            tensor[6].zero_()  # as an engine zeroes a new block
        device.submit(LOAD, round_, one([6], [4]))
        assert device.wait(LOAD, [round_], TIMEOUT_S)
        torch.cuda.synchronize()
        assert all(bool((tensor[6] == value).all()) for tensor in kv), f"round {round_}"


def test_c40_compute_after_a_load_reads_what_was_loaded(
    make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor]
) -> None:
    device = make_cuda(KVLayout(kv), pool)
    for round_ in range(1, _ROUNDS + 1):
        value = round_ % 255 + 1
        pool.rows_array[4] = value
        device.submit(LOAD, round_, one([6], [4]))
        assert device.wait(LOAD, [round_], TIMEOUT_S)
        read = [tensor[6].clone() for tensor in kv]
        assert all(bool((found == value).all()) for found in read), f"round {round_}"


def test_k4_o1_a_block_reused_after_its_wait_never_reaches_the_old_row(
    make_cuda: MakeCUDA, pool: Pool, kv: list[torch.Tensor]
) -> None:
    device = make_cuda(KVLayout(kv), pool)
    for round_ in range(1, _ROUNDS + 1):
        old = round_ % 254 + 1
        for tensor in kv:
            tensor[7].fill_(old)
        torch.cuda._sleep(_SLOW_CYCLES)
        device.submit(STORE, round_, one([7], [3]))
        assert device.wait(STORE, [round_], TIMEOUT_S)
        for tensor in kv:
            tensor[7].fill_(255)
        torch.cuda.synchronize()
        assert bytes(pool.row(3)[: 3 * 2048]) == bytes([old]) * 3 * 2048, f"round {round_}"


def test_c40_copies_do_not_hold_up_the_engines_stream(
    make_cuda: MakeCUDA, make_pool: Callable[..., Pool]
) -> None:
    kv = [torch.zeros(256, 1 << 18, dtype=torch.uint8, device="cuda") for _ in range(4)]
    pool = make_pool(num_rows=256, row_bytes=(1 << 20) + 4096)
    device = make_cuda(KVLayout(kv), pool)
    device.submit(STORE, 1, one(range(256), range(256)))
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert not device.wait(STORE, [1], 0.0), "256 MiB were copied before an empty stream was done"
    assert device.wait(STORE, [1], TIMEOUT_S)


def test_c42_a_pool_that_can_not_be_pinned_still_works_and_says_so(
    make_cuda: MakeCUDA,
    pool: Pool,
    kv: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = 0, pool.geometry.row_bytes - 64
    real = PinnedRows(
        pool, own, torch.cuda.cudart(), bool
    )  # the second registration of the same rows is refused
    try:
        with caplog.at_level(logging.WARNING):
            device = make_cuda(KVLayout(kv), pool)
        assert "CUDA refused to pin the pool" in caplog.text
        assert not device._pinned._addresses
    finally:
        real.release()
    for tensor in kv:
        tensor[2].fill_(5)
    device.submit(STORE, 1, one([2], [1]))
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert bytes(pool.row(1)[: 3 * 2048]) == payload(kv, 2)
