"""What a KV layout accepts, and what it refuses by name."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch

from kvtier_core.proof import PROOF_BYTES
from kvtier_core.transfer import CPUDevice, KVGroup, KVLayout, Pool, StreamDevice
from tests.transfer.conftest import TIMEOUT_S


def test_pages_follow_each_other_in_the_order_given() -> None:
    group = KVGroup([torch.zeros(4, 2, 8, dtype=torch.float32), torch.zeros(4, 10, dtype=torch.int8)])
    assert (group.num_blocks, group.page_bytes, group.page_offsets) == (4, (64, 10), (0, 64))
    assert group.block_bytes == 74


def test_c43_pages_may_lie_anywhere_in_a_slot() -> None:
    pages = [torch.zeros(4, size, dtype=torch.int8) for size in (8, 2, 6, 4)]
    group = KVGroup(pages, page_offsets=[20, 28, 0, 6], slot_bytes=40)
    assert (group.block_bytes, group.slot_bytes) == (20, 40)
    assert group.pieces == ((20, 0, 10), (0, 10, 10))
    assert KVGroup(pages).pieces == ((0, 0, 20),)
    assert KVLayout(group, pages, block_size_factor=3).payload_bytes == (120, 60)


@pytest.mark.parametrize(
    ("offsets", "size", "message"),
    [
        ([0], 40, "2 KV tensors need a page offset each, not 1"),
        ([0, 7], 40, "KV tensors 0 and 1 overlap in a slot, at byte 7"),
        ([0, 8], 15, "pages from byte 0 to 16 are not within a slot of 15 bytes"),
        ([-1, 8], 16, "pages from byte -1 to 16 are not within"),
    ],
)
def test_c43_pages_without_a_place_of_their_own_in_a_slot_are_refused(
    offsets: list[int], size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        KVGroup([torch.zeros(4, 8, dtype=torch.int8)] * 2, page_offsets=offsets, slot_bytes=size)


def test_c41_a_layout_has_a_payload_for_each_group() -> None:
    layout = KVLayout([torch.zeros(4, 8)], KVGroup([torch.zeros(9, 3)] * 2), block_size_factor=3)
    assert layout.payload_bytes == (3 * 32, 3 * 24)
    assert [group.num_blocks for group in layout.groups] == [4, 9]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "at least one tensor"),
        ([torch.zeros(())], "tensor 0 .* holds no blocks"),
        ([torch.zeros(0, 4)], "tensor 0 .* holds no blocks"),
        ([torch.zeros(4, 0)], "tensor 0 .* holds no blocks"),
        ([torch.zeros(4, 2), torch.zeros(5, 2)], "tensor 1 .* has 5 blocks, the first tensor 4"),
        ([torch.zeros(4, 2), torch.zeros(4, 2, device="meta")], "tensor 1 .* is not on cpu"),
        ([torch.zeros(4, 6, 8).transpose(1, 2)], r"tensor 0 .* contiguous, its strides are \(48, 1, 8\)"),
        ([torch.zeros(1, 8).expand(4, 8)], r"blocks overlap, its strides are \(0, 1\)"),
        ([torch.zeros(11).as_strided((4, 8), (1, 1))], r"blocks overlap, its strides are \(1, 1\)"),
    ],
)
def test_a_group_that_can_not_be_moved_is_refused(tensors: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVGroup(tensors)


def test_a_layout_of_nothing_or_of_several_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        KVLayout()
    with pytest.raises(ValueError, match="a factor of at least 1, not 1 and 0"):
        KVLayout([torch.zeros(4, 2)], block_size_factor=0)
    with pytest.raises(ValueError, match="group 1 is on meta, the first one on cpu"):
        KVLayout([torch.zeros(4, 2)], [torch.zeros(4, 2, device="meta")])


@pytest.mark.parametrize("factor", [2.5, 2.0, "2", None, True])
def test_a_factor_that_is_no_whole_number_is_refused(factor: Any) -> None:
    with pytest.raises(TypeError, match="block_size_factor must be a whole number"):
        KVLayout([torch.zeros(4, 2)], block_size_factor=factor)


def test_numpys_whole_numbers_are_some() -> None:
    factor: Any = np.int32(2)
    layout = KVLayout([torch.zeros(4, 2)], block_size_factor=factor)
    assert layout.block_size_factor == 2
    assert type(layout.payload_bytes[0]) is int


def test_what_is_no_sequence_of_tensors_is_refused() -> None:
    """A tensor alone would be taken for as many as it has rows, each with its items for blocks."""
    with pytest.raises(TypeError, match="sequence of tensors, not one tensor"):
        KVLayout(torch.zeros(4, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tensor 1 is a ndarray"):
        KVLayout([torch.zeros(4, 2), np.zeros((4, 2))])  # type: ignore[list-item]


def test_a_layout_does_not_change() -> None:
    tensors = [torch.zeros(4, 2), torch.zeros(4, 2)]
    group, layout = KVGroup(tensors), KVLayout(tensors)
    with pytest.raises(FrozenInstanceError):
        group.num_blocks = 100  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        layout.block_size_factor = 2  # type: ignore[misc]
    assert "block_bytes=16" in repr(layout)


def test_c42_the_cpu_device_refuses_tensors_elsewhere(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool()
    with pytest.raises(ValueError, match="host memory, not on meta"):
        CPUDevice(KVLayout([torch.zeros(4, 8, device="meta")]), pool)


def test_c43_all_workers_parts_must_fit_a_row(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(row_bytes=4096, num_workers=2)
    layout = KVLayout([torch.zeros(4, 8)], [torch.zeros(4, 171)], block_size_factor=3)
    with pytest.raises(
        ValueError, match="2 worker.* 2052 bytes .* of group 1 .* need rows of 4168 bytes, .* have 4096"
    ):
        CPUDevice(layout, pool)


@pytest.mark.parametrize("device_type", [CPUDevice, StreamDevice])
def test_c03_c43_the_workers_parts_leave_room_for_the_proof(
    make_pool: Callable[..., Pool], device_type: type[CPUDevice] | type[StreamDevice]
) -> None:
    pool = make_pool(row_bytes=4096, num_workers=2)
    most = (4096 - PROOF_BYTES) // 2
    with pytest.raises(ValueError, match="64 bytes of proof, need rows of 4098 bytes"):
        device_type(KVLayout([torch.zeros(4, most + 1, dtype=torch.uint8)]), pool)
    device = device_type(KVLayout([torch.zeros(4, most, dtype=torch.uint8)]), pool, 1)
    assert device.shutdown(TIMEOUT_S)
