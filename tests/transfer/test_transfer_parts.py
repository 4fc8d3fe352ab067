"""Workers whose parts of a row have different sizes, or are the same bytes (C43)."""

import pytest
import torch

from kvtier_core.transfer import (
    CPUDevice,
    Direction,
    GroupTransfer,
    KVLayout,
    Pool,
    PoolGeometry,
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
