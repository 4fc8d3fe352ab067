"""Calls on a blocking tier that failed for the moment are made again, within limits (C52)."""

import time
from collections.abc import Callable, Sequence

import pytest

from kvtier_core.manager.blocking.calls import Fault
from kvtier_core.manager.blocking.work import Kind, Unit, retry_at
from kvtier_core.values import TierInfo
from kvtier_testing.rows import similar_keys
from tests.tiers.scripted import BatchTier, Script, ScriptedTier, drive, fail, row

A, B, C, *_ = similar_keys(8)
ASKED = TierInfo(medium="memory", persistent=True, bounded_by="tier")  # its lookups ask the tier


def make_retries(monkeypatch, pause_s):
    """Calls are made three times more, after so long a pause at first."""
    monkeypatch.setattr("kvtier_core.manager.blocking.work._RETRIES", 3)
    monkeypatch.setattr("kvtier_core.manager.blocking.work._FIRST_RETRY_S", pause_s)


class Flaky:
    """A script that raises *error* in the first *times* calls of *method*."""

    def __init__(self, method: str, times: int, error: Callable[[], Exception]) -> None:
        self._method = method
        self._left = times
        self._error = error

    def __call__(self, method: str, _keys: Sequence[bytes]) -> None:
        if method == self._method and self._left:
            self._left -= 1
            fail(self._error())


@pytest.mark.parametrize("error", [lambda: ConnectionResetError("peer"), lambda: TimeoutError("slow")])
@pytest.mark.parametrize("method", ["store", "load", "contains"])
def test_c52_a_call_that_fails_for_a_moment_is_made_again(method, error, monkeypatch):
    make_retries(monkeypatch, 0.001)
    script = Script()
    with drive(script, info=ASKED) as tier:
        if method != "store":
            tier.store({A: row(1)})
        script.before = Flaky(method, 3, error)
        if method == "store":
            assert tier.store({A: row(1)}).error is None
        elif method == "load":
            assert tier.load([A]).rows == {A: row(1)}
        else:
            assert tier.lookup([A]) == [True]
        assert script.count(method) == 4
        assert tier.load([A]).rows == {A: row(1)}
    assert not script.violations


class ClientConnectionError(Exception):
    """As some clients have: none of Python's."""


@pytest.mark.parametrize("method", ["store", "load", "contains"])
def test_i21_c52_a_types_own_transient_exceptions_are_retried(method, monkeypatch):
    make_retries(monkeypatch, 0.001)
    monkeypatch.setattr(ScriptedTier, "transient", (ClientConnectionError,))
    script = Script()
    with drive(script, info=ASKED) as tier:
        tier.store({A: row(1)})
        script.before = Flaky(method, 1, lambda: ClientConnectionError("reset by peer"))
        assert tier.store({B: row(2)}).error is None
        assert tier.lookup([A, B]) == [True, True]
        assert tier.load([A]).rows == {A: row(1)}


def test_c52_the_last_failure_counts_and_the_block_is_served_no_more(monkeypatch):
    make_retries(monkeypatch, 0.001)
    script = Script()
    with drive(script) as tier:
        tier.store({A: row(1), B: row(2)})
        script.before = Flaky("load", 4, lambda: ConnectionResetError("peer"))
        loaded = tier.load([A])
        assert loaded.result.failed == (A,)
        assert "ConnectionResetError: peer" in str(loaded.result.error)
        assert script.count("load") == 4
        assert tier.lookup([A, B]) == [False, True]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), PermissionError("expired token"), ValueError("odd")]
)
def test_c52_what_another_try_would_not_mend_fails_at_once(error, monkeypatch):
    make_retries(monkeypatch, 0.001)
    script = Script()
    script.before = Flaky("store", 1, lambda: error)
    with drive(script) as tier:
        assert tier.store({A: row(1)}).failed == (A,)
        assert script.count("store") == 1


def test_c52_of_a_batch_only_what_failed_for_a_moment_is_tried_again(monkeypatch):
    make_retries(monkeypatch, 0.001)
    script = Script()
    broken = ConnectionResetError("peer")
    answers = iter([[True, broken, OSError(5, "I/O error")]])
    script.before = lambda method, _keys: next(answers, None) if method == "store_many" else None
    with drive(script, base=BatchTier, threads=1) as tier:
        assert tier.store({A: row(1), B: row(2), C: row(3)}).failed == (C,)
        assert [keys for name, keys in script.calls if name == "store_many"] == [(A, B, C), (B,)]


def test_c52_c31_nothing_is_tried_again_past_the_deadline_of_its_job(monkeypatch):
    make_retries(monkeypatch, 3600.0)
    script = Script()
    script.before = Flaky("store", 1, lambda: ConnectionResetError("peer"))
    with drive(script) as tier:
        job = tier.start_store({A: row(1)}, deadline=time.monotonic() + 60)
        assert tier.wait(job).failed == (A,)
        assert script.count("store") == 1


def test_c52_k8_o2_what_waits_for_another_try_is_failed_by_a_shutdown_or_a_cancellation(monkeypatch):
    make_retries(monkeypatch, 3600.0)
    script = Script()
    script.before = Flaky("store", 2, lambda: ConnectionResetError("peer"))
    with drive(script) as tier:
        first, second = tier.start_store({A: row(1)}), tier.start_store({B: row(2)})
        while script.count("store") < 2:
            time.sleep(0.001)
        tier.cancel([first])
        assert tier.wait(first).failed == (A,)
        tier.shutdown()
        assert tier.wait(second).failed == (B,)


def test_c52_pauses_double_and_end(monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.blocking.work._RETRIES", 8)
    monkeypatch.setattr("kvtier_core.manager.blocking.work._FIRST_RETRY_S", 0.5)
    fault = Fault("gone for a moment", is_transient=True)
    pauses = [retry_at(Unit(kind=Kind.LOAD, key=A, tries=tries), fault, 100.0) for tries in range(10)]
    assert pauses == [100.5, 101, 102, 104, 108, 116, 132, 164, None, None]
    assert retry_at(Unit(kind=Kind.LOAD, key=A), True, 100.0) is None
    assert retry_at(Unit(kind=Kind.DELETE, key=A), fault, 100.0) is None
