"""Rows that a tier says have arrived are checked while the rest of their job still loads (C03)."""

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking.calls import Fault
from kvtier_core.manager.blocking.jobs import JobBoard
from kvtier_core.manager.blocking.work import Kind
from kvtier_core.proof import Sealer
from kvtier_core.values import JobResult, RequestInfo, TierJob
from kvtier_memory import MemoryTier
from kvtier_testing.rows import similar_keys
from tests.manager.conftest import PATIENCE_S, Bench, key
from tests.tiers.engine import TierEngine

if TYPE_CHECKING:
    from collections.abc import Callable


class HeldLoad:
    """A load of two stored blocks that its tier holds back, and how often each key's row is checked."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, *, held_before: bool = False) -> None:
        """With *held_before* the first block's row holds that block already, whichever row it gets."""
        bench.new("first")
        bench.store("first", 1, 2)
        bench.settle()
        bench.manager.request_finished("first")
        bench.evict_all()
        self.bench = bench
        self.tier = bench.tiers["one"]
        if held_before:
            for row in range(bench.pool.geometry.num_rows):
                bench.pool.row(row)[:] = self.tier.blocks[self.tier.namespace][key(1)]
        self.tier.hold.add("load")
        bench.new("second")
        bench.until(self._is_loading)
        ((_, self.job, _),) = self.tier.held
        self.checks: Counter[OffloadKey] = Counter()
        self._checked = threading.Condition()
        self.before_check: Callable[[OffloadKey], object] = lambda of: None
        check = Sealer.check

        def counting(sealer: Sealer, of: OffloadKey, row: memoryview, payload_bytes: int) -> bool:
            self.before_check(of)
            found = check(sealer, of, row, payload_bytes)
            with self._checked:
                self.checks[of] += 1
                self._checked.notify_all()
            return found

        monkeypatch.setattr(Sealer, "check", counting)

    def _is_loading(self) -> bool:
        self.bench.manager.lookup("second", [[key(1), key(2)]])
        return bool(self.tier.held)

    def fill(self, position: int) -> None:
        """The tier writes a block where it belongs."""
        self.job.buffers[position][:] = self.tier.blocks[self.tier.namespace][self.job.keys[position]]

    def arrived(self, *positions: int) -> None:
        """The tier says so; wait until they have been looked at."""
        assert self.job.arrived is not None
        before = self.checks.total()
        self.job.arrived(positions)
        with self._checked:
            assert self._checked.wait_for(
                lambda: self.checks.total() >= before + len(positions), timeout=PATIENCE_S
            )

    def answer(self) -> None:
        """The tier says that all is loaded."""
        self.tier.held.clear()
        self.tier._results.append(JobResult(job_id=self.job.id))
        self.tier.context.wake()

    def finish(self) -> list[bool]:
        """The tier says that all is loaded; whether each block that the request gets is right."""
        self.answer()
        return self.bench.load("second", 1, 2)


@pytest.fixture
def load(make_bench, monkeypatch):
    return HeldLoad(make_bench(num_rows=32), monkeypatch)


def test_c03_what_has_arrived_is_checked_before_the_result_and_only_then(load):
    load.fill(0)
    load.arrived(0)
    assert load.checks == {key(1): 1}
    load.fill(1)
    assert load.finish() == [True, True]
    assert load.checks == {key(1): 1, key(2): 1}


def test_c03_what_was_wrong_early_is_checked_again_with_the_result(load):
    load.arrived(0, 1)  # too early: the buffers hold what was there before
    load.fill(0)
    load.fill(1)
    assert load.finish() == [True, True]


def test_c03_wrong_bytes_that_were_told_early_are_a_miss(load):
    load.fill(0)
    load.fill(1)
    load.job.buffers[1][0] ^= 1
    load.arrived(0, 1)
    assert load.finish() == [True]
    assert load.bench.manager.counters.tiers["one"].integrity == 1


def test_c03_a_block_that_its_row_held_before_the_job_has_not_arrived(make_bench, monkeypatch):
    load = HeldLoad(make_bench(num_rows=32), monkeypatch, held_before=True)
    load.arrived(0)  # too early
    load.fill(0)
    load.fill(1)
    load.job.buffers[0][0] ^= 1
    assert load.finish() == []
    assert load.bench.manager.counters.tiers["one"].integrity == 1


def test_c03_what_was_there_before_is_no_load(make_bench, monkeypatch):
    load = HeldLoad(make_bench(num_rows=32), monkeypatch, held_before=True)
    load.fill(1)
    assert load.finish() == []


def test_c03_a_block_that_is_named_again_is_checked_with_the_result(load):
    load.fill(0)
    load.fill(1)
    load.arrived(0)
    load.job.buffers[0][0] ^= 1
    load.job.arrived([0])
    assert load.finish() == []
    assert load.bench.manager.counters.tiers["one"].integrity == 1


def test_c31_however_often_a_block_is_named_it_is_looked_at_early_once(load):
    load.fill(0)
    load.fill(1)
    load.arrived(0)
    for _ in range(100):
        load.job.arrived([0, 0])
    assert load.finish() == [True, True]
    assert load.checks == {key(1): 2, key(2): 1}


def test_c30_what_is_named_after_the_result_is_not_looked_at(load):
    load.fill(0)
    load.fill(1)
    assert load.finish() == [True, True]
    load.job.arrived([0, 1])
    assert load.bench.manager._tiers._integrity._checking.stop(PATIENCE_S)
    assert load.checks == {key(1): 1, key(2): 1}


def test_c30_more_positions_than_blocks_are_the_tiers_mistake(load):
    with pytest.raises(ValueError, match=r"more positions than the job has blocks \(2\)"):
        load.job.arrived([0, 0, 0])
    load.fill(0)
    load.fill(1)
    assert load.finish() == [True, True]


def test_c03_a_block_whose_early_check_is_not_over_is_checked_with_the_result(load):
    begun, may_go_on = threading.Event(), threading.Event()

    def hold_first(of: OffloadKey) -> None:
        if of == key(1) and not begun.is_set():
            begun.set()
            assert may_go_on.wait(PATIENCE_S)

    load.before_check = hold_first
    load.fill(0)
    load.fill(1)
    load.job.buffers[0][0] ^= 1
    load.job.arrived([0])
    assert begun.wait(PATIENCE_S)
    load.arrived(1)  # meanwhile another thread goes on
    assert load.finish() == []
    assert load.bench.manager.counters.tiers["one"].integrity == 1
    may_go_on.set()


def test_c30_a_check_that_could_not_be_made_early_is_made_with_the_result(load):
    def fail_once(of: OffloadKey) -> None:
        load.before_check = lambda of: None
        raise MemoryError

    load.before_check = fail_once
    load.fill(0)
    load.fill(1)
    load.job.arrived([0])
    load.arrived(1)
    assert load.finish() == [True, True]


@pytest.mark.parametrize("positions", [[2], [-1], ["0"], [True], [0, 5]])
def test_c30_positions_that_are_none_are_the_tiers_mistake(load, positions):
    with pytest.raises(ValueError, match="no position of a block in a job of 2"):
        load.job.arrived(positions)
    load.fill(0)
    load.fill(1)
    assert load.finish() == [True, True]


def test_c52_a_blocking_tiers_blocks_are_told_call_by_call_all_of_them_before_the_result():
    told: list[list[int]] = []
    finished: list[int] = []
    board = JobBoard(lambda _kind, _result, _is_fault: finished.append(len(told)))
    job = TierJob(
        id=1,
        request=RequestInfo(request_id="r"),
        keys=[key(number) for number in range(5)],
        arrived=lambda positions: told.append(list(positions)),
    )
    board.begin(job, Kind.LOAD)
    board.settle({1: {0: True, 1: False}})
    board.settle({1: {3: Fault("it broke"), 2: True}})
    assert told == [[0], [2]]
    assert not finished
    board.settle({1: {4: True}})
    assert told == [[0], [2], [4]]
    assert finished == [3]


def test_c03_a_blocking_tiers_blocks_are_checked_once_on_the_thread_that_loaded_them(monkeypatch):
    keys = similar_keys(60)
    checked: list[tuple[str, OffloadKey]] = []
    check = Sealer.check

    def noting(sealer: Sealer, of: OffloadKey, row: memoryview, payload_bytes: int) -> bool:
        checked.append((threading.current_thread().name, of))
        return check(sealer, of, row, payload_bytes)

    with TierEngine(MemoryTier, num_rows=40, threads=1) as engine:
        engine.store("a", keys[:20])
        engine.store("b", keys[20:])  # takes all rows
        monkeypatch.setattr(Sealer, "check", noting)
        assert engine.load("c", keys[:20]) == 20
    assert checked == [("kvtier-far-0", one) for one in keys[:20]]


def test_b8_what_came_and_was_checked_before_the_deadline_counts(make_bench, monkeypatch):
    load = HeldLoad(make_bench(num_rows=32, max_quarantined=1.0), monkeypatch)
    load.fill(0)
    load.arrived(0)
    bench = load.bench
    monkeypatch.setattr(bench.manager, "_clock", lambda: time.monotonic() + 60.0)  # past the deadline
    assert bench.load("second", 1, 2) == [True]
    assert bench.manager.counters.tiers["one"].timeouts == bench.manager.counters.tiers["one"].loaded == 1
    load.fill(1)
    load.answer()
    bench.until(lambda: not bench.manager.coordinator.state.quarantined_rows)


def test_b8_a_block_that_was_named_twice_is_in_doubt_and_no_hit_at_the_deadline(make_bench, monkeypatch):
    load = HeldLoad(make_bench(num_rows=32, max_quarantined=1.0), monkeypatch)
    load.fill(0)
    load.arrived(0)
    assert load.job.arrived is not None
    load.job.arrived([0])
    bench = load.bench
    monkeypatch.setattr(bench.manager, "_clock", lambda: time.monotonic() + 60.0)  # past the deadline
    assert bench.load("second", 1, 2) == []
