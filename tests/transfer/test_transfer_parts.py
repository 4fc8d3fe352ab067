"""Workers whose parts of a row have different sizes, or are the same bytes (C43)."""

from typing import Any

import pytest
import torch

from kvtier_core.transfer import (
    CPUDevice,
    Direction,
    GroupTransfer,
    KVGroup,
    KVLayout,
    Pool,
    PoolGeometry,
    SelfTestError,
    self_test,
)

WIDTHS = (96, 0, 64)
"""Of the workers' pages; one has no layer of the group."""


def layouts(factor=2):
    offset = 0
    for worker, width in enumerate(WIDTHS):
        if width:
            kv = [torch.full((8, width), worker + 1, dtype=torch.uint8)]
            yield worker, kv[0], KVLayout(kv, block_size_factor=factor, row_offsets=[offset * factor])
        offset += width


@pytest.fixture
def pool():
    with Pool.create(PoolGeometry(num_rows=24, row_bytes=4096, num_workers=3)) as made:
        yield made


def wait(device, direction):
    assert device.wait(direction, [1], 60.0)
    assert [result.ok for result in device.get_finished()] == [True]


def test_c43_parts_of_different_sizes_fill_a_row_one_after_another(pool):
    parts = [GroupTransfer(block_ids=[1, 2], rows=[3])]
    for worker, kv, layout in layouts():
        device = CPUDevice(layout, pool, worker)
        device.submit(Direction.STORE, 1, parts)
        wait(device, Direction.STORE)
        kv.zero_()
        device.submit(Direction.LOAD, 1, parts)
        wait(device, Direction.LOAD)
        assert kv[1:3].unique().tolist() == [worker + 1]
        assert device.shutdown(60.0)
    assert bytes(pool.row(3)[:320]) == bytes([1]) * 192 + bytes([3]) * 128
    assert not any(pool.row(3)[320:])


def shared(worker, apart=1):
    """Two layers of four heads, two of each worker. A slot has the first layer's heads in order, then the second's."""
    kv = [torch.full((8, 32), 10 * layer + worker, dtype=torch.uint8) for layer in (1, 2)]
    heads = [pages[:, begin : begin + 16] for pages in kv for begin in (0, 16)]
    places = [64 * layer + 16 * (head * apart + worker * (3 - apart)) for layer in (0, 1) for head in (0, 1)]
    group = KVGroup(heads, page_offsets=places, slot_bytes=128)
    return kv, KVLayout(group, block_size_factor=2, row_offsets=[0])


@pytest.mark.parametrize("apart", [1, 2])
def test_c43_workers_that_share_slots_fill_them_together(pool, apart):
    parts = [GroupTransfer(block_ids=[1, 2, 4], rows=[3, 5], first_slot=1)]
    for worker in (0, 1):
        kv, layout = shared(worker, apart)
        device = CPUDevice(layout, pool, worker)
        self_test(device, layout, pool, worker)
        device.submit(Direction.STORE, 8, parts)
        assert device.wait(Direction.STORE, [8], 60.0)
        (result,) = device.get_finished()
        assert (result.ok, result.bytes) == (True, 3 * 64)
        kept = [pages.clone() for pages in kv]
        for pages in kv:
            pages.zero_()
        device.submit(Direction.LOAD, 8, parts)
        assert device.wait(Direction.LOAD, [8], 60.0)
        for pages, before in zip(kv, kept, strict=True):
            assert torch.equal(pages[[1, 2, 4]], before[[1, 2, 4]])
            assert not pages[[0, 3, 5]].any()
        assert device.shutdown(60.0)
    heads = {1: [0, 0, 1, 1], 2: [0, 1, 0, 1]}[apart]
    slot = b"".join(bytes([10 * layer + worker]) * 16 for layer in (1, 2) for worker in heads)
    assert bytes(pool.row(3)[:256]) == bytes(128) + slot
    assert bytes(pool.row(5)[:256]) == slot * 2
    assert not any(pool.row(3)[256:])


def test_c43_the_self_test_sees_a_write_between_a_workers_pages(pool):
    class Spills(CPUDevice):
        rows: Any = None

        def _copy(self, direction, plan):
            super()._copy(direction, plan)
            if direction is Direction.STORE:
                for row in plan[0][1].tolist():
                    self.rows[row, 128 + 33] ^= 1  # the other worker's

    _, layout = shared(0)
    device = Spills(layout, pool)
    device.rows = pool.rows_array
    with pytest.raises(SelfTestError, match="no transfer was to touch has changed: byte 161 of row"):
        self_test(device, layout, pool)
    device.rows = None  # else the pool can't be closed
    assert device.shutdown(60.0)


@pytest.mark.parametrize("parts", [[], [GroupTransfer(block_ids=[], rows=[])]])
def test_c43_a_worker_that_has_nothing_to_store_is_done_at_once(pool, parts):
    worker, _, layout = next(layouts())
    device = CPUDevice(layout, pool, worker)
    device.submit(Direction.STORE, 1, parts)
    wait(device, Direction.STORE)
    assert device.shutdown(60.0)
    assert not any(pool.row(0))


def test_c43_the_self_test_looks_at_the_workers_own_part(pool):
    for worker, _, layout in layouts():
        device = CPUDevice(layout, pool, worker)
        self_test(device, layout, pool, worker)
        assert device.shutdown(60.0)


def test_c43_a_part_that_would_reach_into_the_proof_is_refused(pool):
    kv = [torch.zeros(8, 64, dtype=torch.uint8)]
    with pytest.raises(ValueError, match="64 bytes a block of group 0 from byte 4000 on.*rows of 4128 bytes"):
        CPUDevice(KVLayout(kv, row_offsets=[4000]), pool)


@pytest.mark.parametrize("offsets", [[], [0, 0], [-1]])
def test_c43_every_group_needs_an_offset(offsets):
    with pytest.raises(ValueError, match="1 KV groups need an offset in a row each"):
        KVLayout([torch.zeros(8, 64)], row_offsets=offsets)
