"""C43, C32, C36 with real worker processes: any order of start, death in a store, rows that are used again."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.proof import Sealer
from kvtier_core.transfer import SCHEDULER, Direction, Pool
from tests.transfer.conftest import TIMEOUT_S, missing
from tests.transfer.tp_worker import LAYERS, PAGE_BYTES, PART_BYTES, geometry_for, stamp_of

STORE, LOAD = Direction.STORE, Direction.LOAD
_ROWS = 8


class Engine:
    """A scheduler, in this process, and workers in theirs, sharing one pool."""

    def __init__(self, num_workers: int) -> None:
        self.name = f"test-{uuid.uuid4().hex}"
        self.num_workers = num_workers
        self.geometry = geometry_for(num_workers, _ROWS)
        self.workers: dict[int, subprocess.Popen[str]] = {}
        self.pool: Pool | None = None
        self.jobs = 0

    def start_scheduler(self) -> None:
        self.pool = Pool.open(self.geometry, self.name, SCHEDULER)

    def start_worker(self, worker: int) -> None:
        program = str(Path(__file__).with_name("tp_worker.py"))
        arguments = [self.name, str(worker), str(self.num_workers), str(_ROWS)]
        self.workers[worker] = subprocess.Popen(
            [sys.executable, program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        )

    def tell(self, worker: int, command: str, *numbers: int) -> None:
        stdin = self.workers[worker].stdin
        assert stdin is not None
        stdin.write(f"{command} {' '.join(map(str, numbers))}\n")
        stdin.flush()

    def answer(self, worker: int) -> str:
        stdout = self.workers[worker].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def store(self, stamp: int, rows: list[int], workers: list[int] | None = None) -> int:
        assert self.pool is not None
        self.jobs += 1
        for worker in range(self.num_workers) if workers is None else workers:
            self.tell(worker, "store", self.jobs, stamp, *rows)
        return self.jobs

    def expected_row(self, stamp: int) -> bytes:
        """All workers' parts."""
        return b"".join(bytes([stamp_of(stamp, worker)]) * PART_BYTES for worker in range(self.num_workers))

    def await_done(self, job: int) -> None:
        await_that(lambda: self.pool.control.is_settled(STORE, job))

    def kill(self, worker: int) -> None:
        process = self.workers.pop(worker)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)

    def end(self) -> None:
        for process in self.workers.values():
            with contextlib.suppress(BrokenPipeError):
                process.communicate(timeout=TIMEOUT_S)
        if self.pool is not None:
            assert self.pool.close()


def await_that(is_so: Callable[[], object]) -> None:
    """Ask until it is so: what other processes write to shared memory wakes nobody."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, "other processes are stuck"
        time.sleep(0)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(num_workers: int, *, started: bool = True) -> Engine:
        engine = Engine(num_workers)
        engines.append(engine)
        if started:
            for worker in range(num_workers):
                engine.start_worker(worker)
            engine.start_scheduler()
            assert [engine.answer(worker) for worker in range(num_workers)] == ["joined"] * num_workers
            engine.pool.wait_for_members(TIMEOUT_S)
        return engine

    yield make
    for engine in engines:
        engine.end()


@pytest.mark.needs_torch
@pytest.mark.parametrize("before", [1, 2, 4])
def test_c43_four_workers_started_before_and_after_the_scheduler_share_one_pool(
    make_engine: Callable[..., Engine], before: int
) -> None:
    engine = make_engine(4, started=False)
    for worker in range(before):
        engine.start_worker(worker)
    for worker in range(before):
        assert engine.answer(worker) == "joined"
    engine.start_scheduler()
    assert set(range(before, 4)) <= set(missing(engine.pool))
    for worker in range(before, 4):
        engine.start_worker(worker)
    engine.pool.wait_for_members(TIMEOUT_S)

    engine.await_done(engine.store(5, [2, 7]))
    for row in (2, 7):
        assert bytes(engine.pool.row(row)[: 4 * PART_BYTES]) == engine.expected_row(5)
    for worker in range(before, 4):
        assert engine.answer(worker) == "joined"
    for worker in range(4):
        engine.tell(worker, "load", 1, 7)
        assert engine.answer(worker) == str(stamp_of(5, worker)), "k13_o1: each worker reads its own part"


@pytest.mark.needs_torch
def test_c43_a_block_is_not_stored_before_the_last_worker_has_moved_its_part(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(4)
    job = engine.store(9, [1], workers=[0, 1, 3])
    await_that(lambda: all(engine.pool.control.get_last_finished(worker, STORE) for worker in (0, 1, 3)))
    assert not engine.pool.control.is_settled(STORE, job)
    engine.tell(2, "store", job, 9, 1)
    engine.await_done(job)
    assert bytes(engine.pool.row(1)[: 4 * PART_BYTES]) == engine.expected_row(9)


@pytest.mark.needs_torch
def test_c43_c32_a_worker_killed_in_the_middle_of_a_store_never_makes_the_block_visible(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(4)
    engine.tell(2, "hold")
    job = engine.store(9, [1])
    assert engine.answer(2) == "half"
    await_that(lambda: all(engine.pool.control.get_last_finished(worker, STORE) for worker in (0, 1, 3)))
    assert missing(engine.pool) == []
    engine.kill(2)
    assert missing(engine.pool) == [2]
    part = bytes(engine.pool.row(1)[2 * PART_BYTES : 3 * PART_BYTES])
    assert part == bytes([stamp_of(9, 2)]) * PAGE_BYTES + bytes((LAYERS - 1) * PAGE_BYTES), "killed half way"
    assert not engine.pool.control.is_settled(STORE, job), "its rows stay out of use"
    assert not engine.pool.control.is_idle, "a reset says that copies are still under way"


class _Resets:
    """Rounds of: stores in two other processes, promotions into their rows as soon as they are settled, a look."""

    def __init__(self, engine: Engine) -> None:
        assert engine.pool is not None
        self.engine, self.pool, self.control = engine, engine.pool, engine.pool.control
        self.chance = random.Random(36)
        self.sealer = Sealer("space")
        self.seen: Counter[str] = Counter()

    def play(self, round_: int) -> None:
        rows = self.chance.sample(range(_ROWS), 3)
        job = self.engine.store(round_, rows)
        # The moment of the look: at once, or when one of the workers has announced the store, or has finished it.
        worker = self.chance.randrange(2)
        get = self.chance.choice([None, self.control.get_last_announced, self.control.get_last_finished])
        if get is not None:
            await_that(lambda: get(worker, STORE) >= job)
        self.seen["settled at once" if self.control.is_settled(STORE, job) else "in flight"] += 1
        await_that(lambda: self.control.is_settled(STORE, job))
        for row in rows:
            assert bytes(self.pool.row(row)[: 2 * PART_BYTES]) == self.engine.expected_row(round_)
            self._promote(row)
        await_that(lambda: self.control.is_idle)
        for row in rows:
            assert self._is_whole(row), f"round {round_}, row {row}"

    def _promote(self, row: int) -> None:
        """As a tier's bytes come in and are found right."""
        target = self.pool.row(row)
        target[: 2 * PART_BYTES] = self.chance.randbytes(1) * 2 * PART_BYTES
        self.sealer.seal(_key(row), target, 2 * PART_BYTES)

    def _is_whole(self, row: int) -> bool:
        return self.sealer.check(_key(row), self.pool.row(row), 2 * PART_BYTES)


def _key(row: int) -> OffloadKey:
    return make_offload_key(bytes([row]) * 32, 0)


@pytest.mark.needs_torch
def test_c36_rows_of_stores_in_flight_elsewhere_hold_promotions_over_1000_rounds(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(2)
    resets = _Resets(engine)
    for round_ in range(1000):
        resets.play(round_)
    for worker in range(2):
        engine.tell(worker, "drain")
        assert engine.answer(worker) == "1000"
    # Each way it can go was seen, or the rounds above prove nothing.
    assert min(resets.seen[way] for way in ("in flight", "settled at once")) > 0, resets.seen


@pytest.mark.needs_torch
def test_k8_o1_c32_nothing_is_left_of_an_engine_killed_at_its_start_and_the_next_start_succeeds(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(2, started=False)
    live = make_engine(1)
    engine.start_worker(0)
    assert engine.answer(0) == "joined"
    engine.kill(0)
    # The same name again, as a restarted engine has it: the dead one's memory is neither waited for nor used.
    for worker in (1, 0):
        engine.start_worker(worker)
    engine.start_scheduler()
    engine.pool.wait_for_members(TIMEOUT_S)
    engine.await_done(engine.store(3, [0]))
    assert not missing(live.pool)
    live.await_done(live.store(4, [5]))
    assert bytes(live.pool.row(5)[:PART_BYTES]) == live.expected_row(4)
