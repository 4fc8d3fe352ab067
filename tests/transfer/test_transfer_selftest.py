"""The self-test: right devices pass, devices that lie do not, and the engine's memory is left as it was."""

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from kvtier_core.transfer import (
    SCHEDULER,
    SELF_TEST_JOBS,
    CPUDevice,
    Direction,
    GroupTransfer,
    KVLayout,
    SelfTestError,
    self_test,
)
from kvtier_core.transfer.plan import Runs
from kvtier_core.transfer.rounds import plan_rounds
from tests.transfer.conftest import TIMEOUT_S, MakeDevice, MakePool
from tests.transfer.kv import LAYOUTS, one, random_tensor, row_bytes
from tests.transfer.simgpu import liars
from tests.transfer.simgpu.liars import LIARS, TRUTHFUL, Honest, find_out

STORE, LOAD = Direction.STORE, Direction.LOAD
_PAGE = Path(__file__).parents[2] / "docs" / "how-tested.md"


@pytest.mark.parametrize("liar", LIARS, ids=[liar.__name__ for liar in LIARS])
def test_a_device_that_lies_is_refused(liar: type[Honest]) -> None:
    assert find_out(liar) is not None, "the self-test has seen nothing"


@pytest.mark.parametrize("kind", TRUTHFUL, ids=lambda kind: kind.__name__)
def test_a_device_that_copies_right_passes_on_a_gpu(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liars, "TRIES", 3)
    assert find_out(kind) is None


def test_compute_is_late_when_a_transfer_is_submitted() -> None:
    """Else a device that does not wait for it would be found by chance."""
    scene = liars.Scene(0)
    scene.gpu.compute._pace_s = 0
    late = []

    class Watches(Honest):
        def submit(self, direction: Direction, job_id: int, parts: Sequence[GroupTransfer]) -> None:
            computed = threading.Event()
            self._gpu.compute.launch(computed.set)
            late.append(not computed.wait(0.002))
            super().submit(direction, job_id, parts)

    with scene.device(Watches) as device:
        self_test(device, scene.layout, scene.pool, 1)
    assert any(late)


def test_the_page_about_testing_counts_the_liars() -> None:
    assert re.findall(r"(\d+) devices that lie", _PAGE.read_text()) == [str(len(LIARS))]


@pytest.mark.parametrize("make_kv", LAYOUTS)
@pytest.mark.parametrize("factor", [1, 3])
def test_c42_every_layout_passes_and_is_left_as_it_was(
    make_pool: MakePool,
    make_device: MakeDevice,
    make_kv: Callable[[torch.dtype], list[torch.Tensor]],
    factor: int,
) -> None:
    kv = make_kv(torch.bfloat16)
    before = [tensor.clone() for tensor in kv]
    layout = KVLayout(kv, block_size_factor=factor)
    pool = make_pool(num_rows=20, row_bytes=row_bytes(layout, 2), num_workers=2)
    device = make_device(layout, pool, 1)
    report = self_test(device, layout, pool, 1)
    assert all(map(_same_bits, kv, before))
    assert not pool.rows_array.any()
    assert device.get_finished() == []
    assert report.is_pinned is None
    assert min(report.store_speed, report.load_speed) > 0
    assert re.match(
        r"stores \d+\.\d GB/s, loads \d+\.\d GB/s; the self-test took \d+\.\d\d s", report.describe()
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_groups_in_one_memory_pass(make_pool: MakePool, make_device: MakeDevice) -> None:
    shared = random_tensor((30, 80), torch.float16)
    before = shared.clone()
    layout = KVLayout([shared[:, :40], shared[:, 40:]], [shared[:, :60]])
    pool = make_pool(row_bytes=row_bytes(layout))
    self_test(make_device(layout, pool), layout, pool)
    assert _same_bits(shared, before)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (1, 40), (2, 3), (40, 1)])
def test_little_memory_is_tested_in_turns(
    make_pool: MakePool, make_device: MakeDevice, rows: int, blocks: int
) -> None:
    layout = KVLayout([torch.zeros(blocks, 8)], [torch.zeros(blocks, 4)], block_size_factor=2)
    pool = make_pool(num_rows=rows)
    self_test(make_device(layout, pool), layout, pool)


def test_a_worker_without_a_row_is_told_what_to_raise(make_pool: MakePool, make_device: MakeDevice) -> None:
    layout = KVLayout([torch.zeros(8, 8)])
    pool = make_pool(num_rows=1, num_workers=2)
    device = make_device(layout, pool)
    with pytest.raises(
        SelfTestError, match="no room to test a (store|load) of KV group 0.*raise pool.capacity"
    ):
        self_test(device, layout, pool)


def test_rows_that_may_be_in_use_are_not_touched(make_pool: MakePool, make_device: MakeDevice) -> None:
    layout = KVLayout([torch.zeros(8, 8)])
    pool = make_pool()
    pool.control.note_member(SCHEDULER)
    device = make_device(layout, pool)
    pool.rows_array[:] = 5
    with pytest.raises(SelfTestError, match="the scheduler may use the pool's rows already"):
        self_test(device, layout, pool)
    assert (pool.rows_array == 5).all()


def test_the_number_of_jobs_is_the_same_for_every_layout(
    make_pool: MakePool, make_device: MakeDevice
) -> None:
    for layout in (
        KVLayout([torch.zeros(8, 8)]),
        KVLayout([torch.zeros(1, 8)], [torch.zeros(90, 8)], block_size_factor=3),
    ):
        pool = make_pool(num_rows=1)
        device = make_device(layout, pool)
        self_test(device, layout, pool)
        for direction in Direction:
            assert pool.control.get_last_finished(0, direction) == SELF_TEST_JOBS
        device.submit(STORE, SELF_TEST_JOBS + 1, one([], []))
        assert device.wait(STORE, [SELF_TEST_JOBS + 1], TIMEOUT_S)


def test_what_is_wrong_is_said_to_the_byte(make_pool: MakePool) -> None:
    """And the pool can be closed while the error is at hand."""
    layout = KVLayout([torch.zeros(8, 8), torch.zeros(8, 4)])
    pool = make_pool()

    class Liar(CPUDevice):
        def _copy(self, direction: Direction, plan: dict[int, Runs]) -> None:
            super()._copy(direction, plan)
            if direction is LOAD:
                for block, _, _, length in plan[0].T.tolist():
                    layout.groups[0].tensors[1].view(torch.uint8)[block : block + length, 5] ^= 1

    device = Liar(layout, pool)
    with pytest.raises(SelfTestError) as raised:
        self_test(device, layout, pool)
    assert device.shutdown(TIMEOUT_S)
    assert pool.close()
    message = str(raised.value)
    assert re.search(
        r"cpu \(worker 0\) did not pass .* in round 1 of 7, .*"
        r"byte 5 of block \d's page in tensor 1 of KV group 0 is 0x..? instead of 0x",
        message,
    )
    assert "run the engine without kvtier on this device, and report" in message


def test_a_device_that_raises_has_not_passed(make_pool: MakePool) -> None:
    layout = KVLayout([torch.zeros(8, 8)])
    pool = make_pool()
    device = CPUDevice(layout, pool)
    assert device.shutdown(TIMEOUT_S)
    with pytest.raises(SelfTestError, match="RuntimeError: (store|load) job 1 was submitted after shutdown"):
        self_test(device, layout, pool)


def test_a_device_that_hangs_has_not_passed(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_core.transfer.selftest._TIMEOUT_S", 0.01)

    class Hangs(CPUDevice):
        def wait(self, *_: object) -> bool:
            return False

    layout = KVLayout([torch.zeros(8, 8)])
    pool = make_pool()
    device = Hangs(layout, pool)
    with pytest.raises(SelfTestError, match=r"a (store|load) did not end within 0.01 s"):
        self_test(device, layout, pool)
    assert device.shutdown(TIMEOUT_S)


def _far_layout() -> KVLayout:
    """As large as a large GPU's: says so, and has no memory."""
    pages = torch.empty(1 << 15, 1 << 20, dtype=torch.uint8, device="meta")
    return KVLayout([pages], [pages], block_size_factor=4)


def test_rounds_reach_the_far_ends_of_large_memory() -> None:
    layout = _far_layout()
    rows = range(100, 5000)
    rounds = plan_rounds(layout, rows, 4 << 20)
    assert len(rounds) == SELF_TEST_JOBS
    for direction in Direction:
        for group in (0, 1):
            parts = [part for round_ in rounds for part in round_[direction] if part.group == group]
            assert len(parts) == SELF_TEST_JOBS
            assert {part.first_slot for part in parts} == {0, 1, 2, 3}
    every = [part for round_ in rounds for some in round_.values() for part in some]
    blocks = {int(block) for part in every for block in part.block_ids}
    used = {int(row) for part in every for row in part.rows}
    far = [1 << power for power in range(11, 15)]  # 2**31 to 2**34 bytes
    assert {0, (1 << 15) - 1, *far, *(at - 1 for at in far)} <= blocks
    assert {100, 4999, 512, 1024} <= used
    assert used <= set(rows)
    for round_ in rounds:
        ids = [block for some in round_.values() for part in some for block in part.block_ids]
        assert len(ids) == len(set(ids)), "groups may share memory"
