"""What a KV layout accepts, and what it refuses by name."""

from collections.abc import Callable

import pytest
import torch

from kvtier_core.transfer import CPUDevice, KVLayout, Pool


def test_pages_follow_each_other_in_the_order_given() -> None:
    layout = KVLayout([torch.zeros(4, 2, 8, dtype=torch.float32), torch.zeros(4, 10, dtype=torch.int8)])
    assert (layout.num_blocks, layout.page_bytes, layout.page_offsets) == (4, (64, 10), (0, 64))
    assert layout.payload_bytes == 74


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
def test_a_layout_that_can_not_be_moved_is_refused(tensors: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVLayout(tensors)


def test_c42_the_cpu_device_refuses_tensors_elsewhere(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool()
    with pytest.raises(ValueError, match="host memory, not on meta"):
        CPUDevice(KVLayout([torch.zeros(4, 8, device="meta")]), pool, pool.control)


def test_c43_all_workers_slices_must_fit_a_row(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(row_bytes=4096, num_workers=2)
    with pytest.raises(
        ValueError, match="2 worker.* 2052 bytes a block need rows of 4104 bytes, .* have 4096"
    ):
        CPUDevice(KVLayout([torch.zeros(4, 513)]), pool, pool.control)
