"""C43: a job counts as done when every worker has finished it, and as stored only when none may have failed."""

import random

import pytest

from kvtier_core.transfer import ControlPage, Direction, JobTally
from kvtier_core.transfer.control import Progress, control_words_bytes

STORE = Direction.STORE


def test_c43_a_job_is_done_when_the_last_worker_has_finished_it() -> None:
    tally = JobTally(3)
    tally.add(5)
    for worker in (2, 0):
        tally.report(worker, Progress(5, 0))
        assert list(tally.take_done()) == []
        assert tally.waiting == [5]
    tally.report(1, Progress(5, 0))
    assert list(tally.take_done()) == [(5, True)]
    assert list(tally.take_done()) == []
    assert tally.waiting == []


def test_c43_one_worker_that_failed_fails_the_job() -> None:
    tally = JobTally(2)
    tally.add(5)
    tally.add(6)
    tally.report(0, Progress(6, 5))
    tally.report(1, Progress(6, 0))
    assert list(tally.take_done()) == [(5, False), (6, True)]


def test_c43_a_job_overtaken_by_a_later_failure_is_doubted_unless_it_was_seen_before() -> None:
    seen, unseen = JobTally(1), JobTally(1)
    for tally in (seen, unseen):
        tally.add(5)
        tally.add(6)
    seen.report(0, Progress(5, 0))
    for tally in (seen, unseen):
        tally.report(0, Progress(6, 6))
    assert list(seen.take_done()) == [(5, True), (6, False)]
    assert list(unseen.take_done()) == [(5, False), (6, False)]


def test_c36_a_discarded_job_is_never_reported() -> None:
    tally = JobTally(2)
    tally.add(5)
    tally.report(0, Progress(5, 5))
    tally.discard(5)
    tally.discard(5)
    tally.add(6)
    for worker in range(2):
        tally.report(worker, Progress(6, 5 if worker == 0 else 0))
    assert list(tally.take_done()) == [(6, True)]


def test_job_ids_must_grow() -> None:
    tally = JobTally(1)
    tally.add(5)
    with pytest.raises(AssertionError):
        tally.add(5)


@pytest.mark.parametrize("seed", range(50))
def test_c43_no_interleaving_makes_a_failed_store_visible(seed: int) -> None:
    """Workers finish jobs through a real control page, the scheduler looks now and then; an oracle knows who failed."""
    chance = random.Random(seed)
    num_workers = chance.randrange(1, 5)
    control = ControlPage(memoryview(bytearray(control_words_bytes(num_workers))), num_workers)
    tally = JobTally(num_workers)
    failed: set[int] = set()
    done: dict[int, bool] = {}
    next_job = [1] * num_workers
    submitted, watchful = 0, chance.random() < 0.5
    while submitted < 60 or any(job <= 60 for job in next_job):
        if submitted < 60 and chance.random() < 0.4:
            submitted += 1
            tally.add(submitted)
        worker = chance.randrange(num_workers)
        if (job := next_job[worker]) <= submitted:
            next_job[worker] += 1
            ok = chance.random() < 0.8
            assert control.begin(worker, STORE, job, 0)
            control.finish(worker, STORE, job, ok=ok)
            failed |= set() if ok else {job}
        if watchful or chance.random() < 0.1:
            for other in range(num_workers):
                tally.report(other, control.get_progress(other, STORE))
            done.update(tally.take_done())
    for worker in range(num_workers):
        tally.report(worker, control.get_progress(worker, STORE))
    done.update(tally.take_done())
    assert set(done) == set(range(1, 61))
    assert list(done) == sorted(done)
    assert not {job for job, ok in done.items() if ok} & failed
    if watchful:
        assert {job for job, ok in done.items() if not ok} == failed, (
            "a scheduler that looks often doubts nothing"
        )
    control.release()
