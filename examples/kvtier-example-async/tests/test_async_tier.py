"""The tests that every tier must pass, and what an asynchronous one owes the core beyond them."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from kvtier_core.tier import OffloadKey
from kvtier_example_async import AsyncTier
from kvtier_example_async.bucket import Bucket
from kvtier_testing.driving import PATIENCE_S, TierDriver
from kvtier_testing.rows import similar_keys
from kvtier_testing.tiers import TierTests

ROW_BYTES = 4096
A, B, C, D = similar_keys(4)


class TestAsync(TierTests):
    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return AsyncTier


class TestSlowAsync(TestAsync):
    @pytest.fixture
    def tier_settings(self) -> Mapping[str, object]:
        return {"latency": "1ms"}


class TestAsyncWithOneThread(TestAsync):
    @pytest.fixture
    def tier_settings(self) -> Mapping[str, object]:
        return {"threads": 1}


class Gate:
    """Holds up every call on a block until it is opened; knows what was called, in order."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.calls: list[OffloadKey] = []
        self._called = threading.Condition()

    def watch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(bucket: Bucket, key: OffloadKey, *arguments: object) -> object:
            with self._called:
                self.calls.append(key)
                self._called.notify_all()
            assert self.opened.wait(PATIENCE_S)
            return call(bucket, key, *arguments)

        return watched

    def wait_for_calls(self, number: int) -> None:
        with self._called:
            assert self._called.wait_for(lambda: len(self.calls) >= number, PATIENCE_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    for name in ("has", "put", "get"):
        monkeypatch.setattr(Bucket, name, gate.watch(getattr(Bucket, name)))
    yield gate
    gate.opened.set()


def drive(**settings: object) -> TierDriver:
    made = AsyncTier.Settings.model_validate({"type": "async_example", **settings})
    return TierDriver(AsyncTier, made, row_bytes=ROW_BYTES)


def row(key: OffloadKey) -> dict[OffloadKey, bytes]:
    return {key: bytes([key[-5]]) * ROW_BYTES}


def test_several_jobs_are_in_flight_at_once(gate: Gate) -> None:
    with drive(threads=3) as tier:
        jobs = [tier.start_store(row(key)) for key in (A, B, C)]
        gate.wait_for_calls(3)  # no call has returned
        assert tier.unanswered() == set(jobs)
        gate.opened.set()
        assert [tier.wait(job).error for job in jobs] == [None] * 3


def test_c28_loads_go_before_stores(gate: Gate) -> None:
    with drive(threads=1) as tier:
        jobs = [tier.start_store(row(A))]
        gate.wait_for_calls(1)
        jobs += [tier.start_store(row(B)), tier.start_load([C], [bytearray(ROW_BYTES)])]
        gate.opened.set()
        for job in jobs:
            tier.wait(job)
    assert gate.calls == [A, C, B]


def test_c30_a_cancelled_job_that_has_not_begun_touches_nothing(gate: Gate) -> None:
    with drive(threads=1) as tier:
        running, waiting = tier.start_store(row(A) | row(B)), tier.start_store(row(C))
        gate.wait_for_calls(1)
        tier.cancel((running, waiting, 77))
        assert tier.wait(waiting).failed == (C,)
        assert tier.unanswered() == {running}  # it is inside a call
        gate.opened.set()
        result = tier.wait(running)
        assert (list(result.failed), result.error) == ([B], "TimeoutError: cancelled")
        assert tier.lookup([A, B, C]) == [True, False, False]


def test_c23_work_past_its_deadline_is_refused() -> None:
    with drive() as tier:
        result = tier.wait(tier.start_store(row(A), deadline=0.0))
        assert (list(result.failed), result.error) == ([A], "TimeoutError: the deadline passed")
        assert tier.lookup([A]) == [False]


def test_c31_a_call_that_hangs_is_named_until_it_ends(gate: Gate) -> None:
    tier = drive()
    job = tier.start_load([A], [bytearray(ROW_BYTES)])
    gate.wait_for_calls(1)
    tier.shutdown(timeout_s=0.01)
    assert tier.drain(0.0) == [job]
    assert tier.unanswered() == {job}
    gate.opened.set()
    assert tier.drain(PATIENCE_S) == []
    tier.wait(job)


def test_c34_a_store_in_flight_at_a_reset_stays_in_the_old_namespace(gate: Gate) -> None:
    with drive(threads=1) as tier:
        job = tier.start_store(row(A))
        gate.wait_for_calls(1)
        tier.reset("another")
        gate.opened.set()
        assert tier.wait(job).error is None  # it was stored, where nobody will look
        assert tier.lookup([A]) == [False]


def test_c30_a_client_that_raises_fails_its_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(bucket: Bucket, key: OffloadKey, block: memoryview) -> None:
        if key == B:
            raise ConnectionResetError("by peer")
        original(bucket, key, block)

    original = Bucket.put
    monkeypatch.setattr(Bucket, "put", put)
    with drive() as tier:
        result = tier.store(row(A) | row(B) | row(C))
        assert (list(result.failed), result.error) == ([B], "ConnectionResetError: by peer")
        assert tier.lookup([A, B, C, D]) == [True, False, True, False]


def test_c30_after_a_shutdown_jobs_fail_at_once() -> None:
    tier = drive()
    tier.shutdown()
    assert tier.wait(tier.start_store(row(A))).error == "the tier was shut down"
    assert tier.wait(tier.start_lookup([A])).present is None


def test_the_bucket_keeps_its_capacity_and_drops_what_was_used_least_lately() -> None:
    bucket = Bucket(capacity=2 * ROW_BYTES, latency=0.0)
    block = memoryview(bytes(ROW_BYTES))
    for key in (A, B):
        bucket.put(key, block)
    assert bucket.get(A, memoryview(bytearray(ROW_BYTES)))
    bucket.put(C, block)
    assert [bucket.has(key) for key in (A, B, C)] == [True, False, True]
    with pytest.raises(OSError, match="does not fit"):
        bucket.put(D, memoryview(bytes(3 * ROW_BYTES)))
    assert [bucket.has(key) for key in (A, C, D)] == [True, True, False]
