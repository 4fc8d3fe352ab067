"""The control page (C36): announce, check, finish, and the two ways a bump can cut in between."""

from collections.abc import Callable

import pytest

from kvtier_core.transfer import ControlPage, Direction, Pool

MakePool = Callable[..., Pool]

STORE, LOAD = Direction.STORE, Direction.LOAD


@pytest.fixture
def control(make_pool: MakePool) -> ControlPage:
    return make_pool().control


def test_c36_a_job_is_settled_when_it_is_finished(control: ControlPage) -> None:
    assert not control.is_settled(STORE, 1, 0)
    assert control.begin(0, STORE, 1, 0)
    assert not control.is_settled(STORE, 1, 0)
    control.finish(0, STORE, 1, ok=True)
    assert control.is_settled(STORE, 1, 0)
    assert not control.is_settled(STORE, 2, 0)


def test_c36_the_directions_do_not_share_counters(control: ControlPage) -> None:
    assert control.begin(0, STORE, 1, 0)
    assert control.begin(0, LOAD, 1, 0)
    control.finish(0, LOAD, 1, ok=True)
    assert control.is_settled(LOAD, 1, 0)
    assert not control.is_settled(STORE, 1, 0)


def test_c36_c43_a_job_is_settled_when_every_worker_has_finished(make_pool: MakePool) -> None:
    control = make_pool(num_workers=3).control
    for worker in (2, 0, 1):
        assert not control.is_settled(STORE, 1, 0)
        assert control.begin(worker, STORE, 1, 0)
        control.finish(worker, STORE, 1, ok=True)
    assert control.is_settled(STORE, 1, 0)


def test_c36_a_job_nobody_announced_is_settled_by_a_bump_and_dropped_later(control: ControlPage) -> None:
    assert control.bump_epoch() == 1
    assert control.is_settled(STORE, 1, 0)
    assert not control.begin(0, STORE, 1, 0)
    assert control.get_last_finished(0, STORE) == 1


def test_c36_a_job_that_is_running_outlives_the_bump(control: ControlPage) -> None:
    assert control.begin(0, STORE, 1, 0)
    control.bump_epoch()
    assert not control.is_settled(STORE, 1, 0)
    control.finish(0, STORE, 1, ok=True)
    assert control.is_settled(STORE, 1, 0)


def test_c36_a_bump_settles_only_what_was_submitted_before_it(control: ControlPage) -> None:
    epoch = control.bump_epoch()
    assert control.is_settled(STORE, 1, 0)
    assert not control.is_settled(STORE, 2, epoch)
    assert not control.begin(0, STORE, 1, 0)
    assert control.begin(0, STORE, 2, epoch)


def test_c36_one_running_worker_is_enough_to_keep_a_job_unsettled(make_pool: MakePool) -> None:
    control = make_pool(num_workers=2).control
    assert control.begin(1, STORE, 1, 0)
    control.bump_epoch()
    assert not control.is_settled(STORE, 1, 0)
    control.finish(1, STORE, 1, ok=True)
    assert control.is_settled(STORE, 1, 0)


def test_c36_a_bump_between_announcement_and_check_drops_the_job(
    control: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def cut_in() -> None:
        monkeypatch.undo()
        control.bump_epoch()
        seen.append(control.is_settled(STORE, 1, 0))

    monkeypatch.setattr(control, "_fence", cut_in)
    assert not control.begin(0, STORE, 1, 0)
    assert seen == [False], "the announcement was not out when the epoch was read"
    assert control.is_settled(STORE, 1, 0)


def test_c36_an_announcement_between_bump_and_look_is_dropped(
    control: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []

    def cut_in() -> None:
        monkeypatch.undo()
        begun.append(control.begin(0, STORE, 1, 0))

    monkeypatch.setattr(control, "_fence", cut_in)
    control.bump_epoch()
    assert begun == [False], "the new epoch was not out when the scheduler looked"
    assert control.is_settled(STORE, 1, 0)


def test_c36_both_sides_pass_a_fence_between_write_and_read(
    control: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    fences: list[tuple[int, int, int]] = []

    def note() -> None:
        fences.append(
            (control.epoch, control.get_last_started(0, STORE), control.get_last_finished(0, STORE))
        )

    monkeypatch.setattr(control, "_fence", note)
    control.begin(0, STORE, 1, 0)
    assert fences == [(0, 1, 0)]
    control.finish(0, STORE, 1, ok=True)
    assert fences[1:] == [(0, 1, 0)], "bytes must be out before the job counts as finished"
    control.bump_epoch()
    assert fences[2:] == [(1, 1, 1)]
    control.is_settled(STORE, 1, 0)
    assert len(fences) == 4


@pytest.mark.parametrize("job_id", [5, 4])
def test_a_job_id_that_does_not_grow_is_refused(control: ControlPage, job_id: int) -> None:
    assert control.begin(0, STORE, 5, 0)
    control.finish(0, STORE, 5, ok=True)
    with pytest.raises(ValueError, match=f"store job {job_id} of worker 0 is not above its last, 5"):
        control.begin(0, STORE, job_id, 0)


def test_c36_a_job_that_has_not_ended_is_not_settled_by_the_next_one(control: ControlPage) -> None:
    assert control.begin(0, STORE, 1, 0)
    with pytest.raises(ValueError, match="store job 1 of worker 0 has not ended, and 2 would settle it"):
        control.begin(0, STORE, 2, 0)
    assert not control.is_settled(STORE, 1, 0)
    assert control.begin(0, LOAD, 2, 0)


def test_c36_a_worker_has_one_device_at_a_time(make_pool: MakePool) -> None:
    control = make_pool(num_workers=2).control
    leave = control.use_worker(0)
    control.use_worker(1)
    with pytest.raises(ValueError, match="worker 0 of this pool has a device already"):
        control.use_worker(0)
    leave()
    control.use_worker(0)
    leave()
    with pytest.raises(ValueError, match="worker 0 of this pool has a device already"):
        control.use_worker(0)
    with pytest.raises(ValueError, match="worker 2 is not one of this pool's 2"):
        control.use_worker(2)


@pytest.mark.parametrize("worker", [-1, 1])
def test_a_worker_the_pool_does_not_know_is_refused(control: ControlPage, worker: int) -> None:
    with pytest.raises(ValueError, match=f"worker {worker} is not one of this pool's 1"):
        control.begin(worker, STORE, 1, 0)


def test_finish_without_begin_is_our_own_mistake(control: ControlPage) -> None:
    with pytest.raises(AssertionError):
        control.finish(0, STORE, 1, ok=True)


def test_counters_hold_64_bits(control: ControlPage) -> None:
    assert control.begin(0, LOAD, 2**64 - 1, 0)
    control.finish(0, LOAD, 2**64 - 1, ok=True)
    assert control.is_settled(LOAD, 2**64 - 1, 0)
