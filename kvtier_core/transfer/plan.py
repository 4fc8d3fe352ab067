"""The copy plan: which device blocks go to which place of which row, and which of them move together.

Pure. A copy call costs far more than the bytes of one small page, so neighbours on both sides go as one. No step visits
the blocks one by one. All groups are planned in one pass: their device blocks are numbered one group after another,
with a gap, so that blocks of two groups are never neighbours.
"""

import reprlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier_core.transfer.direction import Direction

_SHORT = 1 << 16
"""Numbers below this are sorted in a third of the time, for numpy sorts 16 bits by their digits."""

Numbers = npt.NDArray[np.int64]
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

    @cached_property
    def block_counts(self) -> Numbers:
        """``num_blocks``, ``(groups,)``."""
        return np.array(self.num_blocks, dtype=np.int64)

    @cached_property
    def first_numbers(self) -> Numbers:
        """The number of each group's block 0 among the blocks of all groups, ``(groups,)``."""
        counts = self.block_counts + 1
        return np.cumsum(counts) - counts


Runs = npt.NDArray[np.int64]
"""``(4, n)``: the columns ``block, row, slot, length`` say which *length* device blocks from *block* on move as one.

Where a row has one slot they fill that many rows from *row* on, else that many slots of *row* from *slot* on.
"""


def copy_parts(parts: Sequence[GroupTransfer]) -> tuple[GroupTransfer, ...]:
    """The same parts with ids of their own: the caller may use its lists and arrays again.

    Says nothing about whether they are right. Cost: under 10 us for 1,000 blocks, 2 us a part.
    """
    return tuple(
        GroupTransfer(
            block_ids=_copy(part.block_ids),
            rows=_copy(part.rows),
            group=part.group,
            first_slot=part.first_slot,
        )
        for part in parts
    )


def _copy(values: Ids) -> Ids:
    # A list of the caller's numbers is ten times quicker made than an array of them, and the engine's thread does it.
    if isinstance(values, (list, tuple, range)):
        return values if isinstance(values, (tuple, range)) else values.copy()
    return np.array(values)


def plan_transfer(
    direction: Direction, parts: Sequence[GroupTransfer], limits: TransferLimits
) -> dict[int, Runs]:
    """The runs of each group, as few as can be, in the order of what they write. Groups without blocks are left out.

    Raises ``ValueError`` that names the first offender when a part is not consistent, would touch what is outside the
    device's blocks or the pool, or two things would be written to one place; ``TypeError`` for what is no whole number.
    Cost: one sort, and less than a microsecond a part.
    """
    if not parts:
        return {}
    numbers, slots = _pair(parts, limits)
    return _by_group(_merge(direction, numbers, slots, limits), direction, limits)


def _pair(parts: Sequence[GroupTransfer], limits: TransferLimits) -> tuple[Numbers, Numbers]:
    """Each device block, numbered over all groups, and its slot, counted over all rows; ``(n,)`` both."""
    groups = _as_array([part.group for part in parts])  # (parts,)
    firsts = _as_array([part.first_slot for part in parts])
    blocks, num_blocks = _concatenate([part.block_ids for part in parts])
    rows, num_rows = _concatenate([part.rows for part in parts])
    factor = limits.factor
    _refuse_outside("group", groups, len(limits.num_blocks))
    _refuse_outside("first slot", firsts, factor)
    _refuse_other_rows(num_blocks, num_rows, firsts, factor)
    _refuse_outside("block", blocks, _for_each(limits.block_counts[groups], num_blocks))
    _refuse_outside("row", rows, limits.num_rows)
    numbers = blocks + _for_each(limits.first_numbers[groups], num_blocks)
    if factor == 1:
        return numbers, rows
    # Where each block is among the slots of its part's rows, and those among all rows given.
    before = np.cumsum(num_blocks) - num_blocks
    places = np.arange(len(blocks)) + _for_each(firsts - before, num_blocks)
    rows_before = _for_each(np.cumsum(num_rows) - num_rows, num_blocks)
    return numbers, rows[rows_before + places // factor] * factor + places % factor


def _for_each(values: Numbers, counts: Numbers) -> Numbers:
    """Each part's value for each of its blocks; of one part as it is, which numpy spreads by itself."""
    return values if len(values) == 1 else np.repeat(values, counts)


def _concatenate(ids: Sequence[Ids]) -> tuple[Numbers, Numbers]:
    """The ids of all parts, and how many each part has."""
    if len(ids) > 1 and all(isinstance(values, list) for values in ids):
        return _as_array(list(chain.from_iterable(ids))), _as_array([len(values) for values in ids])
    arrays = [_as_array(values) for values in ids]
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return joined, _as_array([len(values) for values in arrays])


def _as_array(values: Ids) -> Numbers:
    """Whole numbers only: numpy would round a fraction down."""
    if not isinstance(values, np.ndarray):
        try:
            packed = struct.pack(f"{len(values)}q", *values)  # a third of the time of numpy's own
        except (TypeError, struct.error):
            raise TypeError(
                "block ids, rows, groups and slots must be whole numbers of 64 bits, not "
                f"{reprlib.repr(_first_strange(values))}"
            ) from None
        return np.frombuffer(packed, dtype=np.int64)
    if values.dtype.kind not in "iu":
        raise TypeError(f"block ids, rows, groups and slots must be whole numbers, not {values.dtype}")
    if values.ndim != 1:
        raise ValueError(f"block ids and rows must be one sequence of numbers, not of shape {values.shape}")
    return values.astype(np.int64, copy=False)


def _first_strange(values: object) -> object:
    """The first of *values* that is no whole number of 64 bits; *values* where they are no sequence."""
    if isinstance(values, Sequence):
        for value in values:
            try:
                struct.pack("q", value)
            except struct.error:
                return value
    return values


def _refuse_outside(name: str, values: Numbers, limits: Numbers | int) -> None:
    if not len(values):
        return
    unsigned = values.view(np.uint64)  # a negative number is a huge one there
    if int(unsigned.max()) < (limits if isinstance(limits, int) else limits.min()):
        return
    outside = unsigned >= np.uint64(limits)
    if outside.any():
        first = int(outside.argmax())
        limit = np.broadcast_to(limits, values.shape)[first]
        raise ValueError(f"{name} {values[first]} is outside 0..{limit - 1}")


def _refuse_other_rows(num_blocks: Numbers, num_rows: Numbers, firsts: Numbers, factor: int) -> None:
    """A part's rows must be just those that its blocks fill or end in; none for no blocks."""
    needed = num_blocks
    if factor > 1:
        needed = np.where(num_blocks > 0, -(-(firsts + num_blocks) // factor), 0)
    wrong = num_rows != needed
    if wrong.any():
        part = int(wrong.argmax())
        why = f": from slot {firsts[part]} on, at {factor} blocks a row, they need {needed[part]}"
        raise ValueError(f"{num_blocks[part]} blocks but {num_rows[part]} rows{'' if factor == 1 else why}")


def _merge(direction: Direction, numbers: Numbers, slots: Numbers, limits: TransferLimits) -> Runs:
    """The runs, with blocks numbered over all groups."""
    factor = limits.factor
    is_store = direction is Direction.STORE
    written = slots if is_store else numbers
    if int(written.max(initial=0)) < _SHORT:
        written = written.astype(np.uint16)
    order = np.argsort(written, kind="stable")
    numbers, slots = numbers[order], slots[order]
    block_steps, slot_steps = numbers[1:] - numbers[:-1], slots[1:] - slots[:-1]
    written_steps = slot_steps if is_store else block_steps
    if not written_steps.all():
        first = int(written_steps.argmin())
        one, other = _find_groups(numbers[first : first + 2], limits)
        if one != other:
            raise _shared(slots[first] // factor)
        what = (
            f"row {slots[first] // factor}"
            if is_store
            else f"block {numbers[first] - limits.first_numbers[one]}"
        )
        raise ValueError(f"{what} is written twice in one {direction.value}")
    begins = np.ones(len(numbers) + 1, dtype=bool)  # and the end of the last
    begins[1:-1] = (block_steps != 1) | (slot_steps != 1)
    if factor > 1:  # the bytes of two rows do not touch: a row ends in padding and proof
        begins[:-1] |= slots % factor == 0
    edges = begins.nonzero()[0]
    starts = edges[:-1]
    return np.array((numbers[starts], *np.divmod(slots[starts], factor), edges[1:] - starts))


def _by_group(runs: Runs, direction: Direction, limits: TransferLimits) -> dict[int, Runs]:
    """Part the runs by group, and give blocks their own numbers back."""
    if not runs.shape[1]:
        return {}
    if len(limits.num_blocks) == 1:
        return {0: runs}
    groups = _find_groups(runs[0], limits)
    if direction is Direction.STORE:
        shared = (runs[1, 1:] == runs[1, :-1]) & (groups[1:] != groups[:-1])
        if shared.any():
            raise _shared(runs[1, shared.argmax()])
    runs[0] -= limits.first_numbers[groups]
    order = np.argsort(groups, kind="stable")
    sorted_groups, runs = groups[order], np.take(runs, order, axis=1)
    edges = [0, *(np.flatnonzero(sorted_groups[1:] != sorted_groups[:-1]) + 1).tolist(), len(groups)]
    return {int(sorted_groups[begin]): runs[:, begin:end] for begin, end in pairwise(edges)}


def _find_groups(numbers: Numbers, limits: TransferLimits) -> Numbers:
    return np.searchsorted(limits.first_numbers, numbers, side="right") - 1


def _shared(row: object) -> ValueError:
    """A row belongs to one group: two that write to it would overwrite each other's bytes."""
    return ValueError(f"row {row} is written by two groups in one store")
