"""Transfers that a reset left behind: their rows are free when every worker has counted past them (C36)."""

import mmap

import pytest

from kvtier_core.transfer import ControlPage, Direction
from kvtier_vllm.unfinished import Unfinished


@pytest.fixture
def control():
    with mmap.mmap(-1, 4096) as memory:
        page = ControlPage(memoryview(memory), 2)
        yield page
        page.release()


def finish(control, worker, direction, number):
    control.announce(worker, direction, number)
    control.finish(worker, direction, number)


def test_c36_rows_wait_for_every_worker_and_every_transfer_before_the_reset(control):
    unfinished = Unfinished(control)
    for _ in range(2):
        unfinished.count(Direction.STORE)
    unfinished.count(Direction.LOAD)
    unfinished.leave({Direction.STORE: [11], Direction.LOAD: [12]})
    assert unfinished
    for worker in (0, 1):
        finish(control, worker, Direction.STORE, 1)
        finish(control, worker, Direction.LOAD, 1)
        assert unfinished.take_settled() == []
    finish(control, 0, Direction.STORE, 2)
    assert unfinished.take_settled() == []
    finish(control, 1, Direction.STORE, 2)
    assert sorted(unfinished.take_settled(), key=lambda item: item[1]) == [
        (Direction.STORE, 11),
        (Direction.LOAD, 12),
    ]
    assert not unfinished


def test_c36_transfers_are_counted_from_those_of_the_self_test_on(control):
    for worker in (0, 1):
        finish(control, worker, Direction.STORE, 7)
        finish(control, worker, Direction.LOAD, 7)
    unfinished = Unfinished(control)
    unfinished.count(Direction.STORE)
    unfinished.leave({Direction.STORE: [11], Direction.LOAD: []})
    assert unfinished.take_settled() == []
    for worker in (0, 1):
        finish(control, worker, Direction.STORE, 8)
    assert unfinished.take_settled() == [(Direction.STORE, 11)]


def test_a_reset_with_nothing_under_way_leaves_nothing(control):
    unfinished = Unfinished(control)
    unfinished.count(Direction.STORE)
    unfinished.leave({Direction.STORE: [], Direction.LOAD: []})
    assert not unfinished


def test_c36_two_resets_are_settled_in_order(control):
    unfinished = Unfinished(control)
    for job in (21, 22):
        unfinished.count(Direction.STORE)
        unfinished.leave({Direction.STORE: [job], Direction.LOAD: []})
    for worker in (0, 1):
        finish(control, worker, Direction.STORE, 1)
    assert unfinished.take_settled() == [(Direction.STORE, 21)]
    for worker in (0, 1):
        finish(control, worker, Direction.STORE, 2)
    assert unfinished.take_settled() == [(Direction.STORE, 22)]
