"""The copy plan against a plain oracle."""

import re
import reprlib
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.transfer import Direction, GroupTransfer
from kvtier_core.transfer.plan import Ids, Runs, TransferLimits, plan_transfer

STORE, LOAD = Direction.STORE, Direction.LOAD
_BLOCKS, _ROWS = 12, 10  # few, so that neighbours on one side, on both and on neither all come up

Move = tuple[int, int, int, int]
"""Group, device block, row, slot."""


def _oracle(parts: Sequence[GroupTransfer], factor: int) -> list[Move]:
    """Every single move, block by block."""
    moves = []
    for part in parts:
        row, slot = 0, part.first_slot
        for block in part.block_ids:
            moves.append((part.group, block, part.rows[row], slot))
            slot += 1
            if slot == factor:
                row, slot = row + 1, 0
    return moves


def _expand(plan: dict[int, Runs], factor: int) -> list[Move]:
    moves = []
    for group, runs in plan.items():
        for block, row, slot, length in runs.T.tolist():
            for i in range(length):
                place = (row + i, 0) if factor == 1 else (row, slot + i)
                moves.append((group, block + i, *place))
    return moves


def _fewest(moves: Sequence[Move], factor: int) -> int:
    """Runs needed: a move begins one unless the same group has a move one block and one place before it."""
    there = set(moves)
    begins = 0
    for group, block, row, slot in moves:
        before = (group, block - 1, row - 1, 0) if factor == 1 else (group, block - 1, row, slot - 1)
        begins += before not in there
    return begins


@st.composite
def _transfers(draw: st.DrawFn) -> tuple[list[GroupTransfer], int]:
    """Parts of up to three groups, partial first and last rows; no row and no block of a group comes twice."""
    factor = draw(st.integers(1, 8))
    rows = draw(st.permutations(range(_ROWS)))
    blocks = {group: draw(st.permutations(range(_BLOCKS))) for group in range(3)}
    parts = []
    for _ in range(draw(st.integers(0, 4))):
        group, first_slot = draw(st.integers(0, 2)), draw(st.integers(0, factor - 1))
        count = draw(st.integers(0, min(len(blocks[group]), max(0, len(rows) * factor - first_slot))))
        needed = -(-(first_slot + count) // factor) if count else 0
        mine, blocks[group] = blocks[group][:count], blocks[group][count:]
        parts.append(
            GroupTransfer(
                group=group,
                # neighbours in order now and then, as engines hand them out
                block_ids=sorted(mine) if draw(st.booleans()) else mine,
                rows=rows[:needed],
                first_slot=first_slot,
            )
        )
        rows = rows[needed:]
    return parts, factor


def _limits(factor: int = 1, groups: int = 3) -> TransferLimits:
    return TransferLimits(num_blocks=(_BLOCKS,) * groups, num_rows=_ROWS, factor=factor)


@given(_transfers(), st.sampled_from(Direction))
def test_c41_runs_are_the_oracles_moves_and_as_few_as_can_be(
    transfer: tuple[list[GroupTransfer], int], direction: Direction
) -> None:
    parts, factor = transfer
    moves = _oracle(parts, factor)
    plan = plan_transfer(direction, parts, _limits(factor))
    assert sorted(_expand(plan, factor)) == sorted(moves)
    assert sum(runs.shape[1] for runs in plan.values()) == _fewest(moves, factor)


@given(_transfers(), st.sampled_from(Direction))
def test_runs_come_in_the_order_of_what_they_write(
    transfer: tuple[list[GroupTransfer], int], direction: Direction
) -> None:
    parts, factor = transfer
    for runs in plan_transfer(direction, parts, _limits(factor)).values():
        written = [
            (row, slot) if direction is STORE else (block, 0) for block, row, slot, _ in runs.T.tolist()
        ]
        assert written == sorted(written)


@given(_transfers(), st.sampled_from(Direction), st.sampled_from([1 << 20, (1 << 16) - 6]))
def test_large_numbers_are_planned_as_small_ones_are(
    transfer: tuple[list[GroupTransfer], int], direction: Direction, far: int
) -> None:
    parts, factor = transfer
    moved = [
        GroupTransfer(
            group=part.group,
            block_ids=[block + far for block in part.block_ids],
            rows=[row + far for row in part.rows],
            first_slot=part.first_slot,
        )
        for part in parts
    ]
    limits = TransferLimits(num_blocks=(far + _BLOCKS,) * 3, num_rows=far + _ROWS, factor=factor)
    expected = plan_transfer(direction, parts, _limits(factor))
    found = plan_transfer(direction, moved, limits)
    assert found.keys() == expected.keys()
    for group, runs in expected.items():
        assert (found[group] == runs + np.array([[far], [far], [0], [0]])).all()


@given(_transfers())
def test_arrays_do_as_well_as_lists(transfer: tuple[list[GroupTransfer], int]) -> None:
    parts, factor = transfer
    arrays = [
        GroupTransfer(
            group=part.group,
            block_ids=np.array(part.block_ids, dtype=np.int32),
            rows=np.array(part.rows, dtype=np.uint64),
            first_slot=part.first_slot,
        )
        for part in parts
    ]
    assert _as_lists(plan_transfer(STORE, arrays, _limits(factor))) == _as_lists(
        plan_transfer(STORE, parts, _limits(factor))
    )


def _as_lists(plan: dict[int, Runs]) -> dict[int, list[list[int]]]:
    return {group: runs.T.tolist() for group, runs in plan.items()}


def _one(block_ids: Ids, rows: Ids, first_slot: int = 0, factor: int = 1) -> list[list[int]]:
    part = GroupTransfer(block_ids=block_ids, rows=rows, first_slot=first_slot)
    return _as_lists(plan_transfer(STORE, [part], _limits(factor)))[0]


def test_neighbours_on_both_sides_move_together() -> None:
    assert _one([4, 3, 5, 9], [1, 0, 2, 3]) == [[3, 0, 0, 3], [9, 3, 0, 1]]


def test_neighbours_on_one_side_only_do_not() -> None:
    assert _one([3, 4], [1, 0]) == [[4, 0, 0, 1], [3, 1, 0, 1]]


def test_c41_partial_first_and_last_rows_keep_their_places() -> None:
    assert _one([2, 3, 4, 5], [7, 3], first_slot=3, factor=4) == [[3, 3, 0, 3], [2, 7, 3, 1]]


def test_slots_of_two_rows_never_move_as_one() -> None:
    assert _one([0, 1, 2, 3], [4, 5], factor=2) == [[0, 4, 0, 2], [2, 5, 0, 2]]


def test_nothing_to_move_is_no_run() -> None:
    assert plan_transfer(STORE, [], _limits()) == {}
    assert plan_transfer(STORE, [GroupTransfer(block_ids=[], rows=[])], _limits()) == {}


def test_many_groups_and_parts_are_planned_in_one_pass() -> None:
    """Every step but the one over the parts is numpy's: as many of them for 1,000 parts of 8 groups as for one."""
    calls: Counter[int] = Counter()
    many = [GroupTransfer(group=i % 8, block_ids=[i // 8], rows=[i]) for i in range(1000)]
    limits = TransferLimits(num_blocks=(125,) * 8, num_rows=1000, factor=1)
    for count in (1, len(many)):

        def tally(_frame: object, event: str, _arg: object, count: int = count) -> None:
            calls[count] += event == "call"

        sys.setprofile(tally)
        try:
            plan_transfer(STORE, many[:count], limits)
        finally:
            sys.setprofile(None)
    assert calls[len(many)] < calls[1] + 3000, "a few calls a part"
    plan = plan_transfer(STORE, many, limits)
    assert sorted(_expand(plan, 1)) == sorted((i % 8, i // 8, i, 0) for i in range(1000))


@pytest.mark.parametrize("values", [np.array([[1], [2]]), np.array([[1, 2]]), np.array(1)])
def test_ids_that_are_no_sequence_of_numbers_are_refused_by_their_shape(values: np.ndarray) -> None:
    with pytest.raises(
        ValueError, match=rf"one sequence of numbers, not of shape {re.escape(str(values.shape))}"
    ):
        _one(values, [0])


def test_bytes_are_numbers_and_not_the_memory_of_some() -> None:
    assert _one(bytes([3] * 1), bytes([1])) == [[3, 1, 0, 1]]


def test_groups_and_slots_are_whole_numbers_too() -> None:
    for wrong in ({"group": 0.5}, {"first_slot": 0.5}, {"group": None}):
        with pytest.raises(TypeError, match="whole numbers"):
            plan_transfer(STORE, [GroupTransfer(block_ids=[0], rows=[0], **wrong)], _limits())


@pytest.mark.parametrize("wrong", [1.5, "3", None, 1 << 63, -(1 << 63) - 1])
def test_an_id_that_is_no_number_is_named(wrong: object) -> None:
    with pytest.raises(TypeError, match=re.escape(f"whole numbers of 64 bits, not {reprlib.repr(wrong)}")):
        _one([0, wrong, 2.5], [0, 1, 2])  # type: ignore[list-item]


def test_the_error_names_the_offender_of_its_own_group() -> None:
    limits = TransferLimits(num_blocks=(3, 5, 2), num_rows=9)
    parts = [
        GroupTransfer(group=group, block_ids=[2, 1], rows=[2 * group, 2 * group + 1]) for group in range(3)
    ]
    with pytest.raises(ValueError, match=r"block 2 is outside 0\.\.1"):
        plan_transfer(STORE, parts, limits)
    twice = [GroupTransfer(group=1, block_ids=[4], rows=[row]) for row in range(2)]
    with pytest.raises(ValueError, match="block 4 is written twice in one load"):
        plan_transfer(LOAD, [*parts[:1], *twice], limits)
    rows = [GroupTransfer(group=group, block_ids=[0], rows=[6]) for group in (2, 0)]
    with pytest.raises(ValueError, match="row 6 is written by two groups in one store"):
        plan_transfer(STORE, rows, limits)


@pytest.mark.parametrize("wrong", [[1.5], [1.0], ["1"], [None], [2**70], np.array([1.0])])
def test_a_block_id_that_is_no_whole_number_is_refused(wrong: list[int]) -> None:
    with pytest.raises(TypeError, match="whole numbers"):
        _one(wrong, [0])


@pytest.mark.parametrize(
    ("direction", "block_ids", "rows", "message"),
    [
        (STORE, [0, 1], [0], "2 blocks but 1 rows"),
        (STORE, [], [0], "0 blocks but 1 rows"),
        (STORE, [12], [0], r"block 12 is outside 0\.\.11"),
        (STORE, [1, 12], [0, 1], r"block 12 is outside 0\.\.11"),
        (STORE, [-1], [0], r"block -1 is outside 0\.\.11"),
        (LOAD, [0], [10], r"row 10 is outside 0\.\.9"),
        (LOAD, [0], [-1], r"row -1 is outside 0\.\.9"),
        (STORE, [0, 1, 2], [3, 5, 3], "row 3 is written twice in one store"),
        (LOAD, [2, 2], [0, 1], "block 2 is written twice in one load"),
    ],
)
def test_a_transfer_that_would_do_harm_is_refused(
    direction: Direction, block_ids: list[int], rows: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_transfer(direction, [GroupTransfer(block_ids=block_ids, rows=rows)], _limits())


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (GroupTransfer(block_ids=[0], rows=[0], first_slot=4), r"first slot 4 is outside 0\.\.3"),
        (GroupTransfer(block_ids=[0], rows=[0], first_slot=-1), r"first slot -1 is outside 0\.\.3"),
        (GroupTransfer(block_ids=[0], rows=[0], group=3), r"group 3 is outside 0\.\.2"),
        (GroupTransfer(block_ids=[0], rows=[0], group=-1), r"group -1 is outside 0\.\.2"),
        (GroupTransfer(block_ids=[0, 1], rows=[0], first_slot=3), "from slot 3 on, at 4 .* they need 2"),
        (GroupTransfer(block_ids=[0], rows=[0, 1]), "1 blocks but 2 rows: .* need 1"),
    ],
)
def test_c41_a_part_that_does_not_fit_its_rows_is_refused(part: GroupTransfer, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_transfer(STORE, [part], _limits(factor=4))


def test_c41_parts_of_one_group_may_share_a_row_but_no_slot() -> None:
    front, back = (
        GroupTransfer(block_ids=[slot], rows=[3], first_slot=slot) for slot in range(2)
    )  # each fills one slot of row 3
    assert _as_lists(plan_transfer(STORE, [back, front], _limits(factor=2))) == {0: [[0, 3, 0, 2]]}
    with pytest.raises(ValueError, match="row 3 is written twice in one store"):
        plan_transfer(STORE, [front, front], _limits(factor=2))


def test_two_groups_do_not_write_to_one_row() -> None:
    parts = [GroupTransfer(group=group, block_ids=[0], rows=[3], first_slot=group) for group in range(2)]
    with pytest.raises(ValueError, match="row 3 is written by two groups in one store"):
        plan_transfer(STORE, parts, _limits(factor=2))
    assert set(plan_transfer(LOAD, parts, _limits(factor=2))) == {0, 1}


def test_reading_one_place_twice_is_fine() -> None:
    twice = {STORE: ([2, 2], [0, 1]), LOAD: ([0, 1], [5, 5])}
    for direction, (block_ids, rows) in twice.items():
        plan = plan_transfer(direction, [GroupTransfer(block_ids=block_ids, rows=rows)], _limits())
        assert _expand(plan, 1) == [(0, block, row, 0) for block, row in zip(block_ids, rows, strict=True)]
