"""The copy plan against a plain oracle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.plan import Run, check_transfer, plan_runs

# Small numbers, so that neighbours on one side, on both and on neither all come up.
_pairs = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=12, unique_by=lambda pair: pair[1]
)


def _expand(runs: list[Run]) -> list[tuple[int, int]]:
    return [(run.block + i, run.row + i) for run in runs for i in range(run.length)]


@given(_pairs)
def test_runs_cover_exactly_the_pairs(pairs: list[tuple[int, int]]) -> None:
    runs = plan_runs([block for block, _ in pairs], [row for _, row in pairs])
    assert sorted(_expand(runs)) == sorted(pairs)
    assert all(run.length >= 1 for run in runs)


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_runs_of_distinct_blocks_are_as_few_as_can_be(blocks: list[int], rows: list[int]) -> None:
    pairs = dict(zip(blocks, rows, strict=True))
    # A run begins wherever the pair before it, one block and one row lower, is not in the job.
    begins = [block for block, row in pairs.items() if pairs.get(block - 1) != row - 1]
    runs = plan_runs(blocks, rows)
    assert sorted(run.block for run in runs) == sorted(begins)


def test_neighbours_on_both_sides_move_together() -> None:
    assert plan_runs([4, 3, 5, 9], [1, 0, 2, 3]) == [Run(3, 0, 3), Run(9, 3, 1)]


def test_neighbours_on_one_side_only_do_not() -> None:
    assert plan_runs([3, 4], [1, 0]) == [Run(3, 1, 1), Run(4, 0, 1)]


def test_nothing_to_move_is_no_run() -> None:
    assert plan_runs([], []) == []


def test_a_block_id_that_is_not_whole_is_refused() -> None:
    with pytest.raises(TypeError):
        plan_runs([1.5], [0])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("direction", "block_ids", "rows", "message"),
    [
        (Direction.STORE, [0, 1], [0], "2 blocks but 1 rows"),
        (Direction.STORE, [4], [0], r"block 4 is outside 0\.\.3"),
        (Direction.STORE, [-1], [0], r"block -1 is outside 0\.\.3"),
        (Direction.LOAD, [0], [8], r"row 8 is outside 0\.\.7"),
        (Direction.LOAD, [0], [-1], r"row -1 is outside 0\.\.7"),
        (Direction.STORE, [0, 1, 2], [3, 5, 3], "row 3 is written twice in one store"),
        (Direction.LOAD, [2, 2], [0, 1], "block 2 is written twice in one load"),
    ],
)
def test_a_transfer_that_would_do_harm_is_refused(
    direction: Direction, block_ids: list[int], rows: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_transfer(direction, block_ids, rows, num_blocks=4, num_rows=8)


def test_reading_one_place_twice_is_fine() -> None:
    check_transfer(Direction.STORE, [2, 2], [0, 1], num_blocks=4, num_rows=8)
    check_transfer(Direction.LOAD, [0, 1], [5, 5], num_blocks=4, num_rows=8)
