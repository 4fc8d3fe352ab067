"""A worker's number is for one device at a time: a second one's jobs would settle those of the first (C36)."""

import pytest
import torch

from kvtier_core.transfer import KVLayout
from tests.transfer.conftest import TIMEOUT_S, MakeDevice, MakePool


def test_c36_a_second_device_of_one_worker_is_refused_until_the_first_is_shut_down(
    make_pool: MakePool, make_device: MakeDevice
) -> None:
    layout = KVLayout([torch.zeros(4, 2048, dtype=torch.uint8)])
    pool = make_pool(num_workers=2)
    first = make_device(layout, pool, 0)
    make_device(layout, pool, 1)
    with pytest.raises(ValueError, match="worker 0 of this pool has a device already: shut that down first"):
        make_device(layout, pool, 0)
    assert first.shutdown(TIMEOUT_S)
    make_device(layout, pool, 0)
