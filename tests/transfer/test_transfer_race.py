"""C36 between two real processes: rows of settled transfers are reused while the worker goes on storing."""

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_core.transfer import Direction, Pool

_STORE = Direction.STORE
_ROWS = 4
_ROW_BYTES = 1 << 18
_MINE = 255
_TIMEOUT_S = 60.0


class _Race:
    """The scheduler: submits stores, changes the epoch, reuses rows once they are settled, looks again."""

    def __init__(self, pool: Pool, mode: str, seed: int) -> None:
        self.pool = pool
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.last_id = 0
        command = [sys.executable, str(Path(__file__).with_name("race_worker.py")), pool.path, mode]
        self.worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def play_round(self) -> None:
        """One store a row, a bump at some moment of them, every row reused, and a last look at the bytes."""
        epoch = self.pool.control.epoch
        jobs = {self._submit(row, epoch, stamp=row + 1): row for row in range(_ROWS)}
        # The moment of the bump: at once, or a little after the worker announced one of the jobs.
        announced = self.random.choice([0, *jobs])
        self._await(lambda: self.pool.control.get_last_started(0, _STORE) >= announced)
        for _ in range(self.random.randrange(400)):
            pass
        self.pool.control.bump_epoch()
        for job_id, row in jobs.items():
            self._await_settled(job_id, epoch)
            self._check_whole(row)
            self.pool.rows_array[row] = _MINE
        self._await_seen(self.last_id)
        if (self.pool.rows_array != _MINE).any():
            self.seen["overwritten after reuse"] += 1

    def finish(self) -> tuple[int, int]:
        """Jobs that the worker finished and dropped."""
        out, _ = self.worker.communicate(timeout=_TIMEOUT_S)
        assert self.worker.returncode == 0
        finished, dropped = map(int, out.split())
        return finished, dropped

    def _submit(self, row: int, epoch: int, stamp: int) -> int:
        self.last_id += 1
        assert self.worker.stdin is not None
        pause_ms = 2 if self.random.random() < 0.05 else 0
        self.worker.stdin.write(f"{self.last_id} {epoch} {row} {stamp} {pause_ms}\n")
        self.worker.stdin.flush()
        return self.last_id

    def _await_settled(self, job_id: int, epoch: int) -> None:
        control = self.pool.control
        if control.get_last_finished(0, _STORE) >= job_id:
            self.seen["finished before the look"] += 1
        elif control.is_settled(_STORE, job_id, epoch):
            self.seen["settled without being finished"] += 1
        else:
            self.seen["waited for"] += 1
        self._await(lambda: control.is_settled(_STORE, job_id, epoch))

    def _await_seen(self, job_id: int) -> None:
        self._await(lambda: self.pool.control.get_last_finished(0, _STORE) >= job_id)

    def _await(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not is_so():
            assert self.worker.poll() is None, "the worker died"
            assert time.monotonic() < deadline, "the worker is stuck"

    def _check_whole(self, row: int) -> None:
        """A settled store wrote all of its row or nothing of it."""
        values = set(self.pool.rows_array[row, ::4096].tolist())
        if len(values) > 1:
            self.seen["torn"] += 1


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool(num_rows=_ROWS, row_bytes=_ROW_BYTES)


def test_c36_rows_of_settled_stores_keep_their_new_bytes(pool: Pool) -> None:
    race = _Race(pool, "correct", seed=36)
    end = time.monotonic() + 5
    rounds = 0
    while rounds < 200 or time.monotonic() < end:
        race.play_round()
        rounds += 1
    finished, dropped = race.finish()
    assert finished + dropped == race.last_id
    assert race.seen["overwritten after reuse"] == 0
    assert race.seen["torn"] == 0
    # Each way it can go was seen, or the rounds above prove nothing.
    assert min(finished, dropped) > 0
    assert race.seen["settled without being finished"] > 0
    assert race.seen["waited for"] > 0


def test_c36_a_worker_that_checks_before_it_announces_is_caught(pool: Pool) -> None:
    race = _Race(pool, "check_first", seed=36)
    for _ in range(500):
        race.play_round()
        if race.seen["overwritten after reuse"]:
            break
    race.finish()
    assert race.seen["overwritten after reuse"] > 0
