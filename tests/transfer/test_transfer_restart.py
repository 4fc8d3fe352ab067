"""Processes that share a pool and die, start again, or fork: who finds whom, and what the dead leave."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier_core.transfer import SCHEDULER, Pool, PoolGeometry
from tests.transfer.conftest import TIMEOUT_S, missing


class Member:
    """A process that runs ``pool_member.py``."""

    def __init__(self, name: str, member: int, num_workers: int) -> None:
        program = str(Path(__file__).with_name("pool_member.py"))
        self.process = subprocess.Popen(
            [sys.executable, program, name, str(member), str(num_workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.pool = self._line()
        """The inode of its pool, or why it has none."""

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self._line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


Start = Callable[..., Member]


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def start(name: str) -> Iterator[Start]:
    members: list[Member] = []

    def start_one(member: int, *, of: int = 1) -> Member:
        members.append(Member(name, member, of))
        return members[-1]

    yield start_one
    for member in members:
        member.kill()


@pytest.fixture
def fork() -> Iterator[Callable[[Member], int]]:
    children: list[int] = []

    def fork_one(member: Member) -> int:
        children.append(int(member.ask("fork")))
        return children[-1]

    yield fork_one
    for child in children:
        os.kill(child, signal.SIGKILL)


def test_c43_a_worker_that_starts_again_before_all_have_come_joins_the_same_pool(start: Start) -> None:
    worker, scheduler = start(0, of=2), start(SCHEDULER, of=2)
    worker.kill()
    again, late = start(0, of=2), start(1, of=2)
    assert {worker.pool, again.pool, late.pool} == {scheduler.pool}
    assert [member.ask("wait") for member in (scheduler, again, late)] == ["all"] * 3


def test_c43_worker_0_which_made_the_pool_may_start_again(start: Start) -> None:
    first, second = start(0, of=2), start(1, of=2)
    first.kill()
    again, scheduler = start(0, of=2), start(SCHEDULER, of=2)
    assert {again.pool, scheduler.pool} == {second.pool}
    assert [member.ask("wait") for member in (second, again, scheduler)] == ["all"] * 3


def test_c43_a_worker_that_starts_again_after_all_have_come_joins_the_pool_of_the_living(
    start: Start,
) -> None:
    worker, scheduler = start(0), start(SCHEDULER)
    assert [member.ask("wait") for member in (scheduler, worker)] == ["all"] * 2
    worker.kill()
    assert scheduler.ask("missing") == "[0]"
    again = start(0)
    assert again.pool == scheduler.pool
    assert [member.ask("wait") for member in (scheduler, again)] == ["all"] * 2


def test_c36_a_scheduler_that_starts_again_is_told_at_once_that_the_pool_is_of_no_use(start: Start) -> None:
    """Workers may still fill rows that only the dead scheduler knew of."""
    worker, scheduler = start(0, of=2), start(SCHEDULER, of=2)
    scheduler.kill()
    for member in (SCHEDULER, 1):
        told = start(member, of=2).pool
        assert "can't be joined again: its scheduler is gone" in told
        assert "End the processes that have it (worker 0)" in told
    worker.kill()
    assert start(0, of=2).ask("missing") == "[-1, 1]"


def test_c36_a_worker_that_died_in_a_job_is_not_followed_by_one_that_would_settle_it(start: Start) -> None:
    worker, scheduler = start(0), start(SCHEDULER)
    assert worker.ask("begin 3") == "begun"
    worker.kill()
    told = start(0).pool
    assert "worker 0 died in the middle of store job 3" in told
    assert "End the processes that have it (the scheduler)" in told
    assert scheduler.ask("missing") == "[0]"


def test_c32_a_killed_worker_is_missing_though_a_child_it_forked_lives(
    start: Start, fork: Callable[[Member], int]
) -> None:
    worker, scheduler = start(0), start(SCHEDULER)
    fork(worker)
    assert scheduler.ask("missing") == "[]"
    worker.kill()
    assert scheduler.ask("missing") == "[0]"


def test_c32_a_forked_child_does_not_keep_the_pool_of_a_dead_engine(
    start: Start, fork: Callable[[Member], int]
) -> None:
    worker, scheduler = start(0), start(SCHEDULER)
    child = fork(scheduler)
    scheduler.kill()
    worker.kill()
    assert worker.pool in map(str, _open_inodes(child)), "the child has the memory"
    again = start(0)
    assert again.pool.isdigit()
    assert again.pool != worker.pool
    assert start(SCHEDULER).pool == again.pool


def test_c32_a_forked_child_that_closes_the_pool_leaves_the_parents_as_it_is(start: Start) -> None:
    worker = start(0)
    assert worker.ask("fork-close") == "closed"
    scheduler = start(SCHEDULER)
    assert worker.pool == scheduler.pool
    assert [member.ask("wait") for member in (scheduler, worker)] == ["all"] * 2


def test_a_forked_child_can_use_rows_but_is_no_member(start: Start) -> None:
    told = start(0).ask("fork-use")
    assert (
        told == "[7, 'this process is no member of the pool: it was closed here, or belongs to the parent']"
    )


def _open_inodes(process: int | str = "self") -> set[int]:
    inodes = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own, and what closes meanwhile
            inodes.add(entry.stat().st_ino)
    return inodes


def _await(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_k8_a_pool_that_is_dropped_takes_its_memory_with_it_and_says_nothing(
    name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    geometry = PoolGeometry(num_rows=4, row_bytes=4096)
    pool = Pool.create(geometry) if kind == "own" else Pool.open(geometry, name, 0)
    inode = os.fstat(pool.fd).st_ino
    del pool
    _await(lambda: inode not in _open_inodes())
    assert name not in caplog.text


def test_c32_whoever_still_uses_rows_is_a_member_though_the_pool_object_is_gone(name: str) -> None:
    geometry = PoolGeometry(num_rows=4, row_bytes=4096)
    worker = Pool.open(geometry, name, 0)
    with Pool.open(geometry, name) as scheduler:
        row = worker.row(1)
        del worker
        assert missing(scheduler) == []
        row[0] = 5
        assert scheduler.row(1)[0] == 5
        del row
        _await(lambda: missing(scheduler) == [0])


def test_c32_a_forked_child_that_drops_a_pool_leaves_the_parents_as_it_is(start: Start) -> None:
    worker = start(0)
    assert worker.ask("fork-drop") == "dropped"
    scheduler = start(SCHEDULER)
    assert worker.pool == scheduler.pool
    assert [member.ask("wait") for member in (scheduler, worker)] == ["all"] * 2
