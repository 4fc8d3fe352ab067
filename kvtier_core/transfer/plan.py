"""The copy plan: which blocks and rows move together. Pure; it moves nothing.

A copy call costs far more than the bytes of one small page, so blocks that are neighbours on both sides go as
one.
"""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier_core.transfer.direction import Direction


class Run(NamedTuple):
    """``length`` blocks from ``block`` on belong to as many rows from ``row`` on."""

    block: int
    row: int
    length: int


def plan_runs(block_ids: Sequence[int], rows: Sequence[int]) -> list[Run]:
    """Pair ``block_ids[i]`` with ``rows[i]`` and merge what is neighbouring on both sides, in order of block.

    The pairs may be copied in any order, provided that no destination is named twice (``check_transfer``).
    Cost: one sort.
    """
    blocks, targets = _as_array(block_ids), _as_array(rows)  # (n,), (n,)
    if len(blocks) == 0:
        return []
    order = np.argsort(blocks, kind="stable")
    blocks, targets = blocks[order], targets[order]
    breaks = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(targets) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(starts, append=len(blocks))
    return [
        Run(*run)
        for run in zip(blocks[starts].tolist(), targets[starts].tolist(), lengths.tolist(), strict=True)
    ]


def check_transfer(
    direction: Direction, block_ids: Sequence[int], rows: Sequence[int], num_blocks: int, num_rows: int
) -> None:
    """Refuse what would write outside the device's blocks or the pool, or twice to one place.

    Raises ``ValueError`` that names the first offender.
    """
    if len(block_ids) != len(rows):
        raise ValueError(f"{len(block_ids)} blocks but {len(rows)} rows")
    for name, values, limit in (("block", block_ids, num_blocks), ("row", rows, num_rows)):
        for value in values:
            if not 0 <= value < limit:
                raise ValueError(f"{name} {value} is outside 0..{limit - 1}")
    name, targets = ("row", rows) if direction is Direction.STORE else ("block", block_ids)
    if len(set(targets)) != len(targets):
        twice = next(value for index, value in enumerate(targets) if value in targets[:index])
        raise ValueError(f"{name} {twice} is written twice in one {direction.value}")


def _as_array(values: Sequence[int]) -> npt.NDArray[np.int64]:
    """Whole numbers only: ``operator.index`` refuses a float, which numpy would round down."""
    return np.fromiter(map(operator.index, values), dtype=np.int64, count=len(values))
