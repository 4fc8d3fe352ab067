"""The copy plan: which device blocks go to which place of which row, and which of them move together.

Pure; it moves nothing. A copy call costs far more than the bytes of one small page, so what is neighbouring on both
sides goes as one. Vectorised: no step of it visits the blocks one by one.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier_core.transfer.direction import Direction

_Numbers = npt.NDArray[np.int64]
Ids = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Device blocks or rows."""


@dataclass(frozen=True, kw_only=True)
class GroupTransfer:
    """Device blocks of one group, in token order, and the rows they belong to.

    A row has *factor* slots, one a device block. ``block_ids[i]`` belongs to slot ``(first_slot + i) % factor`` of
    row ``rows[(first_slot + i) // factor]``: the first row and the last may be used in part.
    """

    block_ids: Ids
    rows: Ids
    group: int = 0
    first_slot: int = 0


@dataclass(frozen=True, kw_only=True)
class TransferLimits:
    """What a transfer must stay inside: device blocks by group, rows of the pool, slots of a row."""

    num_blocks: tuple[int, ...]
    num_rows: int
    factor: int = 1


Runs = npt.NDArray[np.int64]
"""``(4, n)``: the columns ``block, row, slot, length`` say which *length* device blocks from *block* on move as one.

Where a row has one slot, they fill as many rows from *row* on; where it has more, as many slots of *row* from *slot*
on.
"""


def plan_transfer(
    direction: Direction, parts: Sequence[GroupTransfer], limits: TransferLimits
) -> dict[int, Runs]:
    """The runs of each group, as few as can be, in the order of what they write. Groups without blocks are left out.

    Raises ``ValueError`` that names the first offender when a part is not consistent, would touch what is outside the
    device's blocks or the pool, or two things would be written to one place; ``TypeError`` for what is no whole number.
    Cost: one sort a group.
    """
    pairs: dict[int, list[_Numbers]] = {}
    for part in parts:
        pairs.setdefault(part.group, []).append(_pair(part, limits))
    joined = {group: np.concatenate(found, axis=1) for group, found in pairs.items()}
    if direction is Direction.STORE and len(joined) > 1:
        _refuse_shared_rows(joined, limits.factor)
    return {
        group: _merge(direction, blocks, slots, limits.factor)
        for group, (blocks, slots) in joined.items()
        if len(blocks)
    }


def _pair(part: GroupTransfer, limits: TransferLimits) -> _Numbers:
    """``(2, n)``: each device block and its slot, counted over all rows."""
    if not 0 <= part.group < len(limits.num_blocks):
        raise ValueError(f"group {part.group} is outside 0..{len(limits.num_blocks) - 1}")
    factor, first = limits.factor, part.first_slot
    if not 0 <= first < factor:
        raise ValueError(f"first slot {first} is outside 0..{factor - 1}")
    blocks, rows = _as_array(part.block_ids), _as_array(part.rows)  # (n,), (m,)
    if len(rows) != (needed := -(-(first + len(blocks)) // factor) if len(blocks) else 0):
        raise ValueError(
            f"{len(blocks)} blocks but {len(rows)} rows"
            + ("" if factor == 1 else f": from slot {first} on, at {factor} blocks a row, they need {needed}")
        )
    _refuse_outside("block", blocks, limits.num_blocks[part.group])
    _refuse_outside("row", rows, limits.num_rows)
    if factor == 1:
        return np.array((blocks, rows))
    positions = np.arange(first, first + len(blocks))
    return np.array((blocks, rows[positions // factor] * factor + positions % factor))


def _as_array(values: Ids) -> _Numbers:
    """Whole numbers only: numpy would round a fraction down."""
    if not isinstance(values, np.ndarray):
        try:
            return np.frombuffer(array("q", values), dtype=np.int64)  # half the time of numpy's own
        except (TypeError, OverflowError) as error:
            raise TypeError(f"block ids and rows must be whole numbers: {error}") from None
    if values.dtype.kind not in "iu":
        raise TypeError(f"block ids and rows must be whole numbers, not {values.dtype}")
    return values.astype(np.int64, copy=False)


def _refuse_outside(name: str, values: _Numbers, limit: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= limit):
        offender = values[(values < 0) | (values >= limit)][0]
        raise ValueError(f"{name} {offender} is outside 0..{limit - 1}")


def _refuse_shared_rows(joined: dict[int, _Numbers], factor: int) -> None:
    """A row belongs to one group: two that write to it would overwrite each other's bytes."""
    rows = np.concatenate([np.unique(slots // factor) for _, slots in joined.values()])
    found, counts = np.unique(rows, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"row {found[counts > 1][0]} is written by two groups in one store")


def _merge(direction: Direction, blocks: _Numbers, slots: _Numbers, factor: int) -> Runs:
    is_store = direction is Direction.STORE
    order = np.argsort(slots if is_store else blocks, kind="stable")
    blocks, slots = blocks[order], slots[order]
    written = slots if is_store else blocks
    twice = np.flatnonzero(written[1:] == written[:-1])
    if len(twice):
        name, value = ("row", written[twice[0]] // factor) if is_store else ("block", written[twice[0]])
        raise ValueError(f"{name} {value} is written twice in one {direction.value}")
    begins = np.ones(len(blocks), dtype=bool)
    begins[1:] = (blocks[1:] - blocks[:-1] != 1) | (slots[1:] - slots[:-1] != 1)
    if factor > 1:  # the bytes of two rows do not touch: a row ends in padding and proof
        begins |= slots % factor == 0
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=len(blocks))
    first = slots[starts]
    return np.array((blocks[starts], first // factor, first % factor, lengths))
