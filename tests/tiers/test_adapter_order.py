"""Which calls a blocking tier gets, in which order, and which never together."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier_core.values import TierInfo
from kvtier_testing.rows import similar_keys
from tests.tiers.held import num_held
from tests.tiers.scripted import ROW, BatchTier, Clock, Gate, Script, ScriptedTier, drive, row

KEYS = similar_keys(12)
A, B, C, D = KEYS[:4]
ASKED = TierInfo(medium="memory", persistent=True, bounded_by="tier")


def rows(*keys):
    return {key: row(KEYS.index(key)) for key in keys}


def buffers(count: int) -> list[bytearray]:
    return [bytearray(ROW) for _ in range(count)]


def methods(script: Script) -> list[str]:
    return [method for method, _ in script.calls if method not in {"init", "open", "close", "scan"}]


def test_c28_loads_go_before_lookups_before_deletes_before_stores():
    script = Script()
    with drive(script, info=ASKED, threads=1, seed=rows(A, B)) as tier:
        script.before = gate = Gate("store", keys=[C])
        jobs = [tier.start_store(rows(C))]
        gate.wait_entered()
        jobs.append(tier.start_store(rows(D)))
        tier.discard([B])
        jobs.append(tier.start_lookup([A]))
        jobs.append(tier.start_load([A], buffers(1)))
        gate.open()
        for job in jobs:
            assert tier.wait(job).error is None
    assert methods(script) == ["store", "load", "contains", "delete", "store"]


def test_c28_one_thread_of_several_is_kept_from_stores_so_that_no_load_waits_for_one():
    script = Script()
    with drive(script, info=ASKED, threads=3, seed=rows(A)) as tier:
        script.before = gate = Gate("store")
        stores = [tier.start_store(rows(key)) for key in (B, C, D)]
        gate.wait_entered(2)
        assert tier.load([A]).rows == rows(A)
        assert script.count("store") == 2
        gate.open()
        for store in stores:
            assert tier.wait(store).error is None
        assert tier.load([B, C, D]).rows == rows(B, C, D)


def test_c52_a_block_that_is_stored_already_is_not_stored_again():
    script = Script()
    with drive(script) as tier:
        script.before = gate = Gate("store")
        jobs = [tier.start_store(rows(A)) for _ in range(5)]
        gate.open()
        for job in jobs:
            assert tier.wait(job).error is None
        assert tier.store(rows(A)).error is None
        assert script.count("store") == 1


def test_b12_a_block_that_is_stored_already_is_said_to_be_held():
    script = Script()
    with drive(script) as tier:
        assert tier.store(rows(A)).held == ()
        result = tier.store(rows(A, B))
        assert (result.held, result.missing, result.failed) == ((A,), (), ())
        assert script.count("store") == 2


def test_c52_after_a_failed_store_the_one_waiting_behind_it_is_tried():
    script = Script()
    failures = iter([OSError("once")])

    def before(method: str, keys: Sequence[bytes]) -> None:
        if method == "store" and (error := next(failures, None)) is not None:
            raise error

    script.before = before
    with drive(script) as tier:
        first, second = tier.start_store(rows(A)), tier.start_store(rows(A))
        assert {tuple(tier.wait(first).failed), tuple(tier.wait(second).failed)} == {(), (A,)}
        assert tier.load([A]).rows == rows(A)


@pytest.mark.parametrize("threads", [1, 4])
def test_k2_o2_a_load_of_a_key_being_stored_waits_for_it(threads):
    script = Script()
    with drive(script, info=ASKED, threads=threads) as tier:
        script.before = gate = Gate("store")
        store = tier.start_store(rows(A))
        gate.wait_entered()
        (buffer,) = buffers(1)
        load = tier.start_load([A], [buffer])
        assert tier.unanswered() == {store, load}
        gate.open()
        result = tier.wait(load)
        assert not result.missing
        assert buffer == rows(A)[A]
        tier.wait(store)
    assert not script.violations


def test_c52_a_delete_waits_for_a_load_and_a_store_for_the_delete():
    script = Script()
    with drive(script) as tier:
        tier.store(rows(A))
        script.before = gate = Gate("load")
        (buffer,) = buffers(1)
        load = tier.start_load([A], [buffer])
        gate.wait_entered()
        tier.discard([A])
        store = tier.start_store(rows(A))
        assert tier.unanswered() == {load, store}
        gate.open()
        assert tier.wait(load).error is None
        assert tier.wait(store).error is None
        assert methods(script) == ["store", "load", "delete", "store"]
        assert tier.load([A]).rows == rows(A)
    assert not script.violations


def test_c52_batches_are_as_large_as_the_limit_allows(monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.blocking.work.MAX_BATCH_BYTES", 3 * ROW)
    script = Script()
    with drive(script, BatchTier, threads=1) as tier:
        script.before = gate = Gate("store_many", keys=[A])
        first = tier.start_store(rows(A))
        gate.wait_entered()
        second = tier.start_store(rows(*KEYS[1:9]))
        gate.open()
        tier.wait(first)
        tier.wait(second)
        assert [len(keys) for method, keys in script.calls if method == "store_many"] == [1, 3, 3, 2]
        assert tier.load(KEYS[:9]).rows == rows(*KEYS[:9])


@pytest.mark.parametrize(
    ("threads", "waiting", "calls"),
    [(1, 9, [4, 4, 1]), (2, 9, [4, 2, 1, 1, 1]), (4, 14, [3, 2, 2, *[1] * 7])],
)
def test_c52_loads_are_in_larger_calls_where_every_thread_gets_as_much(threads, waiting, calls, monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.blocking.work.MAX_BATCH_BYTES", ROW)
    script, keys = Script(), similar_keys(threads + waiting)
    info = TierInfo(medium="memory", persistent=True, bounded_by="tier", load_batch=4)
    stored = {key: row(0) for key in keys}
    with drive(script, BatchTier, threads=threads, info=info, seed=stored) as tier:
        script.before = gate = Gate("load_many", keys=keys[:threads])
        jobs = []
        for key in keys[:threads]:
            jobs.append(tier.start_load([key], buffers(1)))
            gate.wait_entered()
        jobs.append(tier.start_load(keys[threads:], buffers(waiting)))
        gate.open()
        for job in jobs:
            assert tier.wait(job).error is None
        sizes = [len(keys) for method, keys in script.calls if method == "load_many"]
        assert sorted(sizes[threads:], reverse=True) == calls


def store_calls(store_batch: int, waiting: int, capacity_blocks: int | None = None) -> list[int]:
    """How many blocks each call of one thread stores, of so many that wait for it together."""
    script, keys = Script(), similar_keys(1 + waiting)
    info = TierInfo(medium="memory", persistent=True, bounded_by="tier", store_batch=store_batch)
    with drive(script, BatchTier, threads=1, info=info, capacity_blocks=capacity_blocks) as tier:
        script.before = gate = Gate("store_many", keys=keys[:1])
        jobs = [tier.start_store({keys[0]: row(0)})]
        gate.wait_entered()
        jobs.append(tier.start_store({key: row(0) for key in keys[1:]}))
        gate.open()
        for job in jobs:
            assert tier.wait(job).error is None
    first, *calls = (len(keys) for method, keys in script.calls if method == "store_many")
    assert first == 1
    return calls


@pytest.mark.parametrize(
    ("store_batch", "waiting", "calls"),
    [(1, 3, [1, 1, 1]), (8, 3, [2, 1]), (8, 12, [6, 3, 2, 1]), (8, 40, [8, 8, 8, 8, 4, 2, 2])],
)
def test_c52_a_tier_may_be_given_larger_batches_of_stores(store_batch, waiting, calls, monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.blocking.work.MAX_BATCH_BYTES", ROW)
    assert store_calls(store_batch, waiting) == calls


@pytest.mark.parametrize(
    ("capacity_blocks", "calls"),
    [(80, [8, 6, 3, 2, 1]), (12, [3, 3, 3, 3, 3, 2, 2, 1]), (3, [1] * 20)],
)
def test_c13_what_is_stored_at_once_is_a_small_part_of_the_tier(capacity_blocks, calls, monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.blocking.work.MAX_BATCH_BYTES", ROW)
    assert store_calls(8, 20, capacity_blocks=capacity_blocks) == calls


def test_c28_a_call_stores_a_thousand_blocks_at_most_however_small_they_are(monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.blocking.work.MAX_BATCH_BYTES", ROW)
    calls = store_calls(10_000, 2600)
    assert sum(calls) == 2600
    assert max(calls) == 1024


def test_c52_jobs_that_end_with_one_call_end_together(monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.blocking.work.MAX_BATCH_BYTES", 3 * ROW)
    script, told = Script(), []
    with drive(script, BatchTier, threads=1) as tier:
        board = tier.backend.port._board
        finish = board._finish

        def note_and_finish(*result: Any) -> None:
            told.append(script.count("store_many"))
            finish(*result)

        board._finish = note_and_finish
        script.before = gate = Gate("store_many", keys=[A])
        jobs = [tier.start_store(rows(A))]
        gate.wait_entered()
        jobs += [tier.start_store(rows(key)) for key in (B, C, D)]
        gate.open()
        for job in jobs:
            assert tier.wait(job).error is None
    assert told == [1, 2, 2, 2]


def test_c52_a_block_larger_than_the_batch_limit_still_moves(monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.blocking.work.MAX_BATCH_BYTES", 1)
    with drive(Script(), BatchTier) as tier:
        assert tier.store(rows(A, B)).error is None
        assert tier.load([A, B]).rows == rows(A, B)


def test_c31_work_not_started_by_its_deadline_fails_without_a_call():
    script, clock = Script(), Clock()
    with drive(script, threads=1, monotonic=clock) as tier:
        tier.store(rows(A))
        script.before = gate = Gate("store", keys=[B])
        running = tier.start_store(rows(B), deadline=clock.now + 1)
        gate.wait_entered()
        late = [
            tier.start_load([A], buffers(1), deadline=clock.now + 5),
            tier.start_store(rows(C), deadline=clock.now + 5),
            tier.start_store(rows(B), deadline=clock.now + 5),
        ]
        in_time = tier.start_load([A], buffers(1), deadline=clock.now + 50)
        clock.now += 5
        # The only thread is busy: the results come nevertheless.
        for job in late:
            result = tier.wait(job)
            assert result.failed
            assert not result.missing
            assert result.error is not None
            assert "deadline" in result.error
        gate.open()
        assert tier.wait(running).error is None
        assert tier.wait(in_time).error is None
        assert tier.lookup([A, B, C]) == [True, True, False]
    assert script.count("load") == 1


def test_c31_a_deadline_that_passed_before_the_job_came_fails_it():
    clock = Clock()
    with drive(Script(), monotonic=clock) as tier:
        result = tier.wait(tier.start_store(rows(A, B), deadline=clock.now))
        assert result.failed == (A, B)
        assert tier.lookup([A, B]) == [False, False]


def test_c31_cancelled_work_fails_unless_it_runs():
    script = Script()
    with drive(script, threads=1) as tier:
        script.before = gate = Gate("store")
        running = tier.start_store(rows(A, B))
        gate.wait_entered()
        queued, kept = tier.start_store(rows(C)), tier.start_store(rows(D))
        tier.cancel([running, queued, 999])
        assert tier.wait(queued).failed == (C,)
        gate.open()
        assert tier.wait(running).failed == (B,)
        assert tier.wait(kept).error is None
        assert tier.lookup([A, B, C, D]) == [True, False, False, True]


@pytest.mark.parametrize("seed", range(8))
def test_c52_random_jobs_never_overlap_on_a_key_and_give_exact_bytes(seed):
    """Loads, stores, discards and evictions at once: every answer is right bytes or a miss."""
    rng = random.Random(seed)
    script = Script()
    capacity = rng.choice([None, 3, 6])
    with drive(script, rng.choice([BatchTier, ScriptedTier]), capacity_blocks=capacity, threads=4) as tier:
        jobs: list[int] = []
        loads = []
        errors = []
        for _ in range(400):
            if rng.random() < 0.2 and jobs:
                errors.append(tier.wait(jobs.pop(0)).error)
            keys = rng.sample(KEYS, rng.randint(0, 4))
            action = rng.random()
            if action < 0.45:
                jobs.append(tier.start_store(rows(*keys)))
            elif action < 0.9:
                into = buffers(len(keys))
                loads.append((tier.start_load(keys, into), keys, into))
            else:
                tier.discard(keys)
        found = 0
        for job, keys, into in loads:
            result = tier.wait(job)
            assert not result.failed
            for key, buffer in zip(keys, into, strict=True):
                if key not in result.missing:
                    assert buffer == rows(key)[key]
                    found += 1
        assert found > 0
        errors += [tier.wait(job).error for job in jobs]
        assert all(error is None or "full" in error for error in errors)
        assert None in errors
        assert tier.drain(0) == []
        assert capacity is None or num_held(tier) <= script.most_blocks <= capacity
    assert not script.violations
