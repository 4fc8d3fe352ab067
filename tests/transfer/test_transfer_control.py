"""The control page (C36): announce, finish, and what every worker has finished."""

from collections.abc import Callable

import pytest

from kvtier_core.transfer import ControlPage, Direction, Pool

MakePool = Callable[..., Pool]

STORE, LOAD = Direction.STORE, Direction.LOAD


@pytest.fixture
def control(make_pool: MakePool) -> ControlPage:
    return make_pool().control


def test_c36_a_job_is_settled_when_it_is_finished(control: ControlPage) -> None:
    assert not control.is_settled(STORE, 1)
    control.announce(0, STORE, 1)
    assert not control.is_settled(STORE, 1)
    control.finish(0, STORE, 1)
    assert control.is_settled(STORE, 1)
    assert not control.is_settled(STORE, 2)


def test_c36_the_directions_do_not_share_counters(control: ControlPage) -> None:
    control.announce(0, STORE, 1)
    control.announce(0, LOAD, 1)
    control.finish(0, LOAD, 1)
    assert control.is_settled(LOAD, 1)
    assert not control.is_settled(STORE, 1)


def test_a_worker_that_can_not_copy_any_more_is_seen_by_the_scheduler(make_pool: MakePool) -> None:
    control = make_pool(num_workers=3).control
    assert not control.has_failed
    control.note_failure(2)
    assert control.has_failed


def test_c36_c43_a_job_is_settled_when_every_worker_has_finished(make_pool: MakePool) -> None:
    control = make_pool(num_workers=3).control
    for worker in (2, 0, 1):
        assert not control.is_settled(STORE, 1)
        control.announce(worker, STORE, 1)
        control.finish(worker, STORE, 1)
    assert control.is_settled(STORE, 1)


def test_c36_a_fence_stands_before_and_after_the_bytes(
    control: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    fences: list[tuple[int, int]] = []
    look = lambda: fences.append(  # noqa: E731
        (control.get_last_announced(0, STORE), control.get_last_finished(0, STORE))
    )
    monkeypatch.setattr(control, "_fence", look)
    control.announce(0, STORE, 1)
    assert fences == [(1, 0)], "a job must be announced before a row is touched"
    control.finish(0, STORE, 1)
    assert fences[1:] == [(1, 0)], "bytes must be out before the job counts as finished"
    control.is_settled(STORE, 1)
    assert len(fences) == 3


@pytest.mark.parametrize("job_id", [5, 4])
def test_a_job_id_that_does_not_grow_is_refused(control: ControlPage, job_id: int) -> None:
    control.announce(0, STORE, 5)
    control.finish(0, STORE, 5)
    with pytest.raises(ValueError, match=f"store job {job_id} of worker 0 is not above its last, 5"):
        control.announce(0, STORE, job_id)


def test_c36_jobs_that_wait_in_line_are_not_settled_by_those_before_them(control: ControlPage) -> None:
    control.announce(0, STORE, 1)
    control.announce(0, STORE, 2)
    control.finish(0, STORE, 1)
    assert control.is_settled(STORE, 1)
    assert not control.is_settled(STORE, 2)
    assert not control.is_idle
    assert control.get_unfinished(0, STORE) == 2
    control.finish(0, STORE, 2)
    assert control.is_idle
    assert control.get_unfinished(0, STORE) is None


def test_c36_a_worker_has_one_device_at_a_time(make_pool: MakePool) -> None:
    control = make_pool(num_workers=2).control
    control.take_worker(0)
    control.take_worker(1)
    with pytest.raises(ValueError, match="worker 0 of this pool has a device already"):
        control.take_worker(0)
    control.leave_worker(0)
    control.take_worker(0)
    with pytest.raises(ValueError, match="worker 2 is not one of this pool's 2"):
        control.take_worker(2)


@pytest.mark.parametrize("worker", [-1, 1])
def test_a_worker_the_pool_does_not_know_is_refused(control: ControlPage, worker: int) -> None:
    with pytest.raises(ValueError, match=f"worker {worker} is not one of this pool's 1"):
        control.announce(worker, STORE, 1)


def test_finish_without_announce_is_our_own_mistake(control: ControlPage) -> None:
    with pytest.raises(AssertionError):
        control.finish(0, STORE, 1)


def test_counters_hold_64_bits(control: ControlPage) -> None:
    control.announce(0, LOAD, 2**64 - 1)
    control.finish(0, LOAD, 2**64 - 1)
    assert control.is_settled(LOAD, 2**64 - 1)
