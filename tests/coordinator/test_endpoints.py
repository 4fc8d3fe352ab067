"""End points of several groups (C21, K12-O3), against an oracle that tries every one of them block by block."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.coordinator.endpoints import GroupCosts, GroupShape, find_end, find_ends, last_candidate


def groups(*described: tuple[int, int | None, str]) -> list[GroupCosts]:
    """Groups of (tokens per block, window, blocks): ``x`` can't be had, a digit is the rows that a block takes."""
    return [
        GroupCosts(
            GroupShape(tokens, window),
            [letter == "x" for letter in blocks],
            [0 if letter == "x" else int(letter) for letter in blocks],
        )
        for tokens, window, blocks in described
    ]


def oracle(costs: list[GroupCosts], room: int) -> list[int]:
    """All valid end points, found token by token."""
    found = []
    for end in range(max(len(group.blocked) * group.shape.tokens_per_block for group in costs) + 1):
        needed = []
        for group in costs:
            size, window = group.shape.tokens_per_block, group.shape.window
            if end % size:
                break
            tokens = range(end) if window is None else range(max(0, end - window), end)
            blocks = {token // size for token in tokens}
            if any(block >= len(group.blocked) or group.blocked[block] for block in blocks):
                break
            needed += [group.rows[block] for block in blocks]
        else:
            if all(end // g.shape.tokens_per_block <= len(g.blocked) for g in costs) and sum(needed) <= room:
                found.append(end)
    return found


def shapes() -> st.SearchStrategy[GroupCosts]:
    """One random group."""
    blocks = st.lists(st.tuples(st.booleans(), st.integers(0, 1)), max_size=12)
    return st.builds(
        lambda tokens, window, blocks: GroupCosts(
            GroupShape(tokens, window), [no for no, _ in blocks], [rows for _, rows in blocks]
        ),
        st.sampled_from((1, 2, 3, 4)),
        st.one_of(st.none(), st.integers(0, 9)),
        blocks,
    )


@given(st.lists(shapes(), min_size=1, max_size=3), st.integers(0, 12))
def test_c21_k12_o3_the_end_points_are_the_oracles(costs, room):
    assert find_end(costs, room) == max(oracle(costs, room))
    assert [*find_ends(costs, room), 0] == oracle(costs, room)[::-1]


@given(st.lists(shapes(), min_size=1, max_size=3), st.integers(0, 12))
def test_c21_no_end_point_lies_behind_the_last_candidate(costs, room):
    assert find_end(costs, room) <= last_candidate(costs)


@pytest.mark.parametrize(
    ("described", "room", "end"),
    [
        pytest.param([(4, None, "0000")], 0, 16, id="a whole prefix"),
        pytest.param([(4, None, "00x0")], 0, 8, id="a prefix ends at its hole"),
        pytest.param([(4, None, "1111")], 3, 12, id="a prefix ends where the room does"),
        pytest.param([(4, 8, "xx00")], 0, 16, id="a window needs no more than its last blocks"),
        pytest.param([(4, 8, "00x0")], 0, 8, id="a hole in the window moves the end before it"),
        pytest.param([(4, 5, "xx00")], 0, 16, id="a window that ends inside a block needs all of it"),
        pytest.param([(4, None, "0000"), (4, 4, "0x0x")], 0, 12, id="groups agree on one end"),
        pytest.param([(4, None, "00000"), (8, None, "00")], 0, 16, id="blocks of two sizes end together"),
        pytest.param([(4, None, "00000000"), (4, 4, "000x0xx0")], 1, 32, id="only the last window counts"),
        pytest.param(
            [(4, None, "0000"), (4, 8, "1111")], 2, 16, id="a window takes rows of its own blocks alone"
        ),
        pytest.param(
            [(4, None, "0000"), (4, 8, "1111")], 1, 4, id="a window that does not fit moves the end"
        ),
        pytest.param([(4, None, "0000"), (4, None, "")], 9, 0, id="a group without blocks allows nothing"),
    ],
)
def test_c21_end_points(described, room, end):
    assert find_end(groups(*described), room) == end


def test_k12_o2_groups_of_very_different_sizes_end_together():
    assert find_end(groups((3584, None, "00"), (64, None, "0" * 111)), 0) == 3584
    assert find_end(groups((3584, None, "00"), (64, None, "0" * 112)), 0) == 7168


def test_c21_the_cost_of_an_end_point_grows_with_the_blocks_alone():
    def seconds(blocks: int) -> float:
        costs = [
            GroupCosts(GroupShape(16), [False] * blocks, [1] * blocks),
            GroupCosts(GroupShape(16, 1024), [i % 60 == 0 for i in range(blocks)], [1] * blocks),
        ]
        began = time.process_time()
        find_end(costs, blocks)
        return time.process_time() - began

    seconds(2_000)
    assert seconds(200_000) < 500 * max(seconds(2_000), 0.001)


def test_c21_holes_windows_and_room_by_hand():
    def end(shape: GroupShape, blocked: list[bool], room: int = 9) -> int:
        costs = GroupCosts(shape, blocked, [1] * len(blocked))
        return find_end([costs], room)

    assert end(GroupShape(1, window=2), [False, True, False]) == 1, "a hole within the window"
    assert end(GroupShape(2, window=3), [True, False]) == 0, "a window reaches into the block it begins in"
    assert end(GroupShape(1), [False] * 3, room=3) == 3, "rows may be taken to the last one"
    assert end(GroupShape(1), [False] * 3, room=2) == 2
