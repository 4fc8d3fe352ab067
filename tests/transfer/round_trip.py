"""A store and a load of several groups at once, checked byte by byte against what they must do. For every device."""

import random
from collections.abc import Callable, Mapping, Sequence

import torch

from kvtier_core.transfer import Device, Direction, GroupTransfer, KVLayout, Pool
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import payload, places, random_tensor, row_bytes, spread

STORE, LOAD = Direction.STORE, Direction.LOAD
_ROWS = 24
_WORKERS = 2


def _groups(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Full attention, layer-major with K and V apart; a window with smaller pages; one block-major tensor."""
    full = [random_tensor((30, 40), dtype, seed=i) for i in range(6)]
    window = random_tensor((4, 17, 9), dtype, seed=7)  # (layers, blocks, items)
    return [full, list(window.unbind(0)), [random_tensor((21, 3, 25), dtype, seed=8)]]


class Chance:
    """A random transfer, and what it must do, block by block."""

    def __init__(self, seed: str, factor: int) -> None:
        self.random = random.Random(seed)
        self.factor = factor

    def parts(self, rows: Sequence[int], blocks_of: Mapping[int, Sequence[int]]) -> list[GroupTransfer]:
        """Some of each group's blocks, to or from some of *rows*: at least a row and a block a group are needed."""
        free_rows = self.random.sample(rows, len(rows))
        most = len(rows) // len(blocks_of) * self.factor
        parts = []
        for group in self.random.sample(list(blocks_of), len(blocks_of)):
            first_slot = self.random.randrange(self.factor)
            count = self.random.randrange(1, min(len(blocks_of[group]), most - first_slot) + 1)
            blocks = self.random.sample(blocks_of[group], count)
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


def round_trip(
    make_pool: Callable[..., Pool],
    make_device: Callable[[KVLayout, Pool, int], Device],
    *,
    factor: int,
    dtype: torch.dtype,
    seed: int,
    place: str = "cpu",
    apart: bool = False,
) -> None:
    """Store random parts, then load others: the job's bytes are in their places, and all others as before.

    The pages of a block lie *apart*, anywhere in its slot, or follow one another.
    """
    groups = [_at(place, tensors) for tensors in _groups(dtype)]
    chance = Chance(f"{seed}{factor}{dtype}", factor)
    shaped = [spread(tensors, chance.random) for tensors in groups] if apart else groups
    layout = KVLayout(*shaped, block_size_factor=factor)
    pool = make_pool(num_rows=_ROWS, row_bytes=row_bytes(layout, _WORKERS), num_workers=_WORKERS)
    worker = seed % _WORKERS
    device = make_device(layout, pool, worker)
    blocks_of = {group: range(len(tensors[0])) for group, tensors in enumerate(groups)}

    parts = chance.parts(range(_ROWS), blocks_of)
    pool.rows_array[:] = 9
    expected = pool.rows_array.copy()
    for (row, slot), (group, block) in chance.moves(parts).items():
        found = payload(groups[group], block)
        expected[row, places(layout, group, worker, slot)] = list(found)
    device.submit(STORE, 1, parts)
    assert device.wait(STORE, [1], TIMEOUT_S)
    assert [result.error for result in device.get_finished()] == [None]
    assert (pool.rows_array == expected).all(), (
        "bytes in the wrong place, or rows touched that are not the job's"
    )

    pool.rows_array[:] = chance.random.randbytes(1)[0]
    pool.rows_array.reshape(-1)[:: chance.random.randrange(1, 50)] += 1
    parts = chance.parts(range(_ROWS), blocks_of)
    after = {(g, b): payload(groups[g], b) for g, blocks in blocks_of.items() for b in blocks}
    for (row, slot), (group, block) in chance.moves(parts).items():
        after[group, block] = pool.rows_array[row, places(layout, group, worker, slot)].tobytes()
    device.submit(LOAD, 1, parts)
    assert device.wait(LOAD, [1], TIMEOUT_S)
    assert [result.error for result in device.get_finished()] == [None]
    assert {(g, b): payload(groups[g], b) for g, b in after} == after


def _at(place: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same bytes at another place; strided views stay strided there."""
    if place == "cpu":
        return tensors
    moved = {id(t.untyped_storage()): t.untyped_storage().to(device=torch.device(place)) for t in tensors}
    return [
        torch.empty(0, dtype=t.dtype, device=place).set_(
            moved[id(t.untyped_storage())], t.storage_offset(), t.shape, t.stride()
        )
        for t in tensors
    ]
