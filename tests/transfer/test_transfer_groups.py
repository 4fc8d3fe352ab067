"""C41: groups of different page sizes in one transfer, factors 1 to 8, partial first and last rows, byte-exact."""

from collections.abc import Callable

import pytest
import torch

from kvtier_core.transfer import CPUDevice, Direction, GroupTransfer, KVLayout, Pool, cpu
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import DTYPES
from tests.transfer.round_trip import round_trip

STORE = Direction.STORE
_SEEDS = range(4)


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", range(1, 9))
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("how", ["whole", "shared_out"])
def test_c41_c43_every_byte_goes_to_its_slot_and_comes_back(
    make_pool: Callable[..., Pool],
    make_device: Callable[..., CPUDevice],
    factor: int,
    dtype: torch.dtype,
    seed: int,
    how: str,
    apart: bool,  # noqa: FBT001 - a parameter of the test
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how == "shared_out":  # as if every block were large
        monkeypatch.setattr(cpu, "_SHARED_BYTES", 1)
        monkeypatch.setattr(cpu, "_CALL_BYTES", 0)
    round_trip(make_pool, make_device, factor=factor, dtype=dtype, seed=seed, apart=apart)


def test_a_result_counts_the_bytes_of_all_groups(
    make_pool: Callable[..., Pool], make_device: Callable[..., CPUDevice]
) -> None:
    layout = KVLayout([torch.zeros(4, 8)], [torch.zeros(9, 3), torch.zeros(9, 2)], block_size_factor=2)
    device = make_device(layout, make_pool())
    parts = [
        GroupTransfer(block_ids=[1, 2, 3], rows=[5, 6], first_slot=1),
        GroupTransfer(group=1, block_ids=[7], rows=[0]),
    ]
    device.submit(Direction.STORE, 1, parts)
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert [result.bytes for result in device.get_finished()] == [3 * 32 + 20]
