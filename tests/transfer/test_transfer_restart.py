"""Processes that share a pool and die, start again, or fork: who finds whom, and what the dead leave."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier_core.transfer import SCHEDULER, Direction, JobTally, Pool, PoolGeometry
from tests.transfer.conftest import TIMEOUT_S


class Member:
    """A process that runs ``pool_member.py``."""

    def __init__(self, name: str, member: int, num_workers: int, kind: str) -> None:
        program = str(Path(__file__).with_name("pool_member.py"))
        self.process = subprocess.Popen(
            [sys.executable, program, name, str(member), str(num_workers), kind],
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

    def start_one(member: int, *, of: int = 1, kind: str = "anonymous") -> Member:
        members.append(Member(name, member, of, kind))
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


@pytest.mark.parametrize("kind", ["anonymous", "named"])
def test_c43_a_worker_that_starts_again_before_all_have_come_joins_the_same_pool(
    start: Start, kind: str
) -> None:
    scheduler, worker = start(SCHEDULER, of=2, kind=kind), start(0, of=2, kind=kind)
    worker.kill()
    again, late = start(0, of=2, kind=kind), start(1, of=2, kind=kind)
    assert {worker.pool, again.pool, late.pool} == {scheduler.pool}
    assert [member.ask("wait") for member in (scheduler, again, late)] == ["all"] * 3


@pytest.mark.parametrize("kind", ["anonymous", "named"])
def test_c43_whoever_made_the_pool_may_start_again(start: Start, kind: str) -> None:
    first, second = start(0, of=2, kind=kind), start(1, of=2, kind=kind)
    first.kill()
    again, scheduler = start(0, of=2, kind=kind), start(SCHEDULER, of=2, kind=kind)
    assert {again.pool, scheduler.pool} == {second.pool}
    assert [member.ask("wait") for member in (second, again, scheduler)] == ["all"] * 3


@pytest.mark.parametrize("kind", ["anonymous", "named"])
@pytest.mark.parametrize("first", [SCHEDULER, 0])
def test_c43_a_worker_that_starts_again_after_all_have_come_joins_the_pool_of_the_living(
    start: Start, kind: str, first: int
) -> None:
    """Whoever made the pool: of a named one the name is gone by then."""
    members = {member: start(member, kind=kind) for member in (first, -1 - first)}
    scheduler, worker = members[SCHEDULER], members[0]
    assert [member.ask("wait") for member in (scheduler, worker)] == ["all"] * 2
    worker.kill()
    assert scheduler.ask("missing") == "[0]"
    again = start(0, kind=kind)
    assert again.pool == scheduler.pool
    assert [member.ask("wait") for member in (scheduler, again)] == ["all"] * 2


def test_c32_a_named_pool_of_the_dead_is_not_joined_though_a_child_they_forked_has_it(
    start: Start, fork: Callable[[Member], int]
) -> None:
    scheduler, worker = start(SCHEDULER, kind="named"), start(0, kind="named")
    assert [member.ask("wait") for member in (scheduler, worker)] == ["all"] * 2
    fork(scheduler)
    scheduler.kill()
    worker.kill()
    again = start(SCHEDULER, kind="named")
    assert again.pool.isdigit()
    assert again.pool != scheduler.pool


def test_c43_a_second_engine_of_a_named_pools_name_is_refused(start: Start) -> None:
    scheduler, worker = start(SCHEDULER, kind="named"), start(0, kind="named")
    assert [member.ask("wait") for member in (scheduler, worker)] == ["all"] * 2
    assert "the scheduler of this pool is already there" in start(SCHEDULER, kind="named").pool


def test_c36_a_scheduler_that_starts_again_is_told_at_once_that_the_pool_is_of_no_use(start: Start) -> None:
    """Workers may still fill rows that only the dead scheduler knew of."""
    scheduler, worker = start(SCHEDULER, of=2), start(0, of=2)
    scheduler.kill()
    for member in (SCHEDULER, 1):
        told = start(member, of=2).pool
        assert "can't be joined again: its scheduler is gone" in told
        assert "End the processes that have it (worker 0)" in told
    worker.kill()
    assert start(SCHEDULER, of=2).ask("missing") == "[0, 1]"


def test_c36_a_worker_that_died_in_a_job_is_not_followed_by_one_that_would_settle_it(start: Start) -> None:
    scheduler, worker = start(SCHEDULER), start(0)
    assert worker.ask("begin 3") == "True"
    worker.kill()
    told = start(0).pool
    assert "worker 0 died in the middle of store job 3" in told
    assert "End the processes that have it (the scheduler)" in told
    assert scheduler.ask("missing") == "[0]"


def test_c32_a_killed_worker_is_missing_though_a_child_it_forked_lives(
    start: Start, fork: Callable[[Member], int]
) -> None:
    scheduler, worker = start(SCHEDULER), start(0)
    fork(worker)
    assert scheduler.ask("missing") == "[]"
    worker.kill()
    assert scheduler.ask("missing") == "[0]"


def test_c32_a_forked_child_does_not_keep_the_name_of_a_dead_engine(
    start: Start, fork: Callable[[Member], int], name: str
) -> None:
    scheduler = start(SCHEDULER)
    fork(scheduler)
    scheduler.kill()
    deadline = time.monotonic() + TIMEOUT_S
    while name in Path("/proc/net/unix").read_text():  # the child lets go when its turn comes
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again = start(SCHEDULER)
    assert again.pool.isdigit()
    assert again.pool != scheduler.pool


@pytest.mark.parametrize("kind", ["anonymous", "named"])
def test_c32_a_forked_child_that_closes_the_pool_leaves_the_parents_as_it_is(start: Start, kind: str) -> None:
    scheduler = start(SCHEDULER, kind=kind)
    assert scheduler.ask("fork-close") == "closed"
    worker = start(0, kind=kind)
    assert worker.pool == scheduler.pool
    assert [member.ask("wait") for member in (scheduler, worker)] == ["all"] * 2


def test_a_forked_child_can_use_rows_but_is_no_member(start: Start) -> None:
    told = start(SCHEDULER).ask("fork-use")
    assert (
        told == "[7, 'this process is no member of the pool: it was closed here, or belongs to the parent']"
    )


def _open_inodes() -> set[int]:
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own, and what closes meanwhile
            inodes.add(entry.stat().st_ino)
    return inodes


def _await(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ["own", "anonymous", "named"])
def test_k8_a_pool_that_is_dropped_takes_memory_thread_and_names_with_it_and_says_nothing(
    name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    geometry = PoolGeometry(num_rows=4, row_bytes=4096)
    threads = threading.active_count()
    pool = Pool.create(geometry) if kind == "own" else Pool.open(geometry, name, named=kind == "named")
    inode = os.fstat(pool.fd).st_ino
    del pool
    _await(lambda: inode not in _open_inodes() and threading.active_count() == threads)
    assert name not in Path("/proc/net/unix").read_text()
    assert not [entry for entry in os.listdir("/dev/shm") if name in entry]
    assert name not in caplog.text


def test_c32_whoever_still_uses_rows_is_a_member_though_the_pool_object_is_gone(name: str) -> None:
    geometry = PoolGeometry(num_rows=4, row_bytes=4096)
    with Pool.open(geometry, name) as scheduler:
        worker = Pool.open(geometry, name, 0)
        row = worker.row(1)
        del worker
        assert scheduler.missing_members() == []
        row[0] = 5
        assert scheduler.row(1)[0] == 5
        del row
        _await(lambda: scheduler.missing_members() == [0])


def test_c32_a_forked_child_that_drops_a_pool_leaves_the_parents_as_it_is(start: Start) -> None:
    scheduler = start(SCHEDULER)
    assert scheduler.ask("fork-drop") == "dropped"
    worker = start(0)
    assert worker.pool == scheduler.pool
    assert [member.ask("wait") for member in (scheduler, worker)] == ["all"] * 2


def test_c36_what_a_dead_worker_had_not_begun_does_not_look_stored_with_its_successors_first_job(
    name: str,
) -> None:
    geometry = PoolGeometry(num_rows=4, row_bytes=4096)
    tally = JobTally(1)
    with Pool.open(geometry, name) as scheduler:
        control = scheduler.control
        with Pool.open(geometry, name, 0) as worker:
            tally.add(1)
            assert worker.control.begin(0, Direction.STORE, 1, 0)
            worker.control.finish(0, Direction.STORE, 1, ok=True)
            tally.report(0, control.get_progress(0, Direction.STORE))
            for job in (2, 3):  # handed to it, and queued
                tally.add(job)
        with Pool.open(geometry, name, 0) as again:
            tally.add(4)
            assert again.control.begin(0, Direction.STORE, 4, 0)
            again.control.finish(0, Direction.STORE, 4, ok=True)
            tally.report(0, control.get_progress(0, Direction.STORE))
            assert list(tally.take_done()) == [(1, True), (2, False), (3, False), (4, True)]
