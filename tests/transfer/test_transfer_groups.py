"""C41: groups of different page sizes in one transfer, factors 1 to 8, partial first and last rows, byte-exact."""

import random
from collections.abc import Callable

import pytest
import torch

from kvtier_core.transfer import CPUDevice, Direction, GroupTransfer, KVGroup, KVLayout, Pool
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import DTYPES, payload, random_tensor, row_bytes

STORE, LOAD = Direction.STORE, Direction.LOAD
_ROWS = 24
_WORKERS = 2
_SEEDS = range(4)


def _groups(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Full attention, layer-major with K and V apart; a window with smaller pages; one block-major tensor."""
    full = [random_tensor((30, 40), dtype, seed=i) for i in range(6)]
    window = random_tensor((4, 17, 9), dtype, seed=7)  # (layers, blocks, items)
    return [full, list(window.unbind(0)), [random_tensor((21, 3, 25), dtype, seed=8)]]


class _Chance:
    """A random transfer, and what it must do, block by block."""

    def __init__(self, seed: str, factor: int, num_blocks: list[int]) -> None:
        self.random = random.Random(seed)
        self.factor = factor
        self.num_blocks = num_blocks

    def parts(self) -> list[GroupTransfer]:
        free_rows = self.random.sample(range(_ROWS), _ROWS)
        parts = []
        for group in self.random.sample(range(3), 3):
            first_slot = self.random.randrange(self.factor)
            count = self.random.randrange(1, min(self.num_blocks[group], 8 * self.factor - first_slot) + 1)
            blocks = self.random.sample(range(self.num_blocks[group]), count)
            if self.random.random() < 0.5:
                blocks.sort()
            needed = -(-(first_slot + count) // self.factor)
            rows, free_rows = free_rows[:needed], free_rows[needed:]
            parts.append(GroupTransfer(group=group, block_ids=blocks, rows=rows, first_slot=first_slot))
        return parts

    def moves(self, parts: list[GroupTransfer]) -> dict[tuple[int, int], tuple[int, int]]:
        """``(row, slot)`` to ``(group, block)``."""
        return {
            (part.rows[place // self.factor], place % self.factor): (part.group, block)
            for part in parts
            for place, block in enumerate(part.block_ids, start=part.first_slot)
        }


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", range(1, 9))
@pytest.mark.parametrize("by_layer", [False, True])
def test_c41_c43_every_byte_goes_to_its_slot_and_comes_back(
    make_pool: Callable[..., Pool],
    make_device: Callable[..., CPUDevice],
    factor: int,
    dtype: torch.dtype,
    seed: int,
    by_layer: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    groups = _groups(dtype)
    layout = KVLayout(*groups, block_size_factor=factor)
    pool = make_pool(num_rows=_ROWS, row_bytes=row_bytes(layout, _WORKERS), num_workers=_WORKERS)
    worker = seed % _WORKERS
    device = make_device(layout, pool, worker)
    chance = _Chance(f"{seed}{factor}{dtype}", factor, [len(tensors[0]) for tensors in groups])

    parts = chance.parts()
    pool.rows_array[:] = 9
    expected = pool.rows_array.copy()
    for (row, slot), (group, block) in chance.moves(parts).items():
        found = payload(groups[group], block)
        begin = worker * layout.payload_bytes[group] + slot * len(found)
        expected[row, begin : begin + len(found)] = list(found)
    device.submit_store(1, parts, epoch=0)
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert (pool.rows_array == expected).all(), (
        "bytes in the wrong place, or rows touched that are not the job's"
    )

    pool.rows_array[:] = chance.random.randbytes(1)[0]
    pool.rows_array.reshape(-1)[:: chance.random.randrange(1, 50)] += 1
    parts = chance.parts()
    after = {(g, b): payload(groups[g], b) for g in range(3) for b in range(chance.num_blocks[g])}
    for (row, slot), (group, block) in chance.moves(parts).items():
        size = len(after[group, block])
        begin = worker * layout.payload_bytes[group] + slot * size
        after[group, block] = pool.rows_array[row, begin : begin + size].tobytes()
    device.submit_load(1, parts, epoch=0, by_layer=by_layer)
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert {(g, b): payload(groups[g], b) for g, b in after} == after
    assert [result.ok for result in device.get_finished()] == [True, True]


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
