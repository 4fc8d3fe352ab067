"""C41: groups of different page sizes in one transfer, factors 1 to 8, partial first and last rows, byte-exact."""

from collections.abc import Callable

import pytest
import torch

from kvtier_core.transfer import CPUDevice, Direction, GroupTransfer, KVGroup, KVLayout, Pool, cpu
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import DTYPES
from tests.transfer.round_trip import round_trip

STORE, LOAD = Direction.STORE, Direction.LOAD
_SEEDS = range(4)


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", range(1, 9))
@pytest.mark.parametrize("how", ["whole", "by_layer", "shared_out"])
def test_c41_c43_every_byte_goes_to_its_slot_and_comes_back(
    make_pool: Callable[..., Pool],
    make_device: Callable[..., CPUDevice],
    factor: int,
    dtype: torch.dtype,
    seed: int,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how == "shared_out":  # as if every block were large
        monkeypatch.setattr(cpu, "_SHARE_BYTES", 1)
        monkeypatch.setattr(cpu, "_CALL_BYTES", 0)
    round_trip(make_pool, make_device, factor=factor, dtype=dtype, seed=seed, by_layer=how == "by_layer")


def test_a_result_counts_the_bytes_of_all_groups(
    make_pool: Callable[..., Pool], make_device: Callable[..., CPUDevice]
) -> None:
    layout = KVLayout([torch.zeros(4, 8)], [torch.zeros(9, 3), torch.zeros(9, 2)], block_size_factor=2)
    device = make_device(layout, make_pool())
    parts = [
        GroupTransfer(block_ids=[1, 2, 3], rows=[5, 6], first_slot=1),
        GroupTransfer(group=1, block_ids=[7], rows=[0]),
    ]
    device.submit_store(1, parts, epoch=0)
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert [result.bytes for result in device.get_finished()] == [3 * 32 + 20]


def test_layers_of_several_groups_load_in_the_models_order(
    make_pool: Callable[..., Pool], make_device: Callable[..., CPUDevice]
) -> None:
    full = KVGroup([torch.zeros(4, 8) for _ in range(4)], layers=[0, 0, 2, 2])
    window = KVGroup([torch.zeros(4, 4)], layers=[1])
    pool = make_pool()
    pool.rows_array[:] = 1
    device = make_device(KVLayout(full, window), pool)
    seen: list[list[int]] = []
    reach = device._lanes[LOAD]._reach

    def look(job_id: int, layer: int) -> None:
        tensors = [*full.tensors[::2], *window.tensors]
        seen.append([layer, *(bool(tensor[2].any()) for tensor in tensors)])
        reach(job_id, layer)

    device._lanes[LOAD]._reach = look  # type: ignore[method-assign]
    parts = [GroupTransfer(group=group, block_ids=[2], rows=[group]) for group in range(2)]
    device.submit_load(1, parts, epoch=0, by_layer=True)
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert seen == [[0, True, False, False], [1, True, False, True], [2, True, True, True]]
