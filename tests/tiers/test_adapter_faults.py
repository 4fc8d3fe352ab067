"""What a faulty blocking tier can do to its jobs: fail them, and nothing else (C30)."""

import asyncio
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvtier_core.errors import TierOpenError
from kvtier_core.manager.blocking.calls import TierCalls
from kvtier_core.values import TierInfo
from kvtier_testing.rows import similar_keys
from tests.tiers.scripted import ROW, BatchTier, Gate, ScanningTier, Script, ScriptedTier, drive, fail, row

A, B, C, D, *_ = similar_keys(8)
ASKED = TierInfo(medium="memory", persistent=True, bounded_by="tier")


def only(method: str, key: bytes, act: Callable[[], object]) -> Callable[[str, Sequence[bytes]], object]:
    """A script that acts in calls of *method* on *key* only."""
    return lambda called, keys: act() if called == method and key in keys else None


def rows(*keys):
    return {key: row(index) for index, key in enumerate(keys, start=1)}


def test_c30_k2_o1_one_faulty_block_loses_no_other_and_can_be_stored_later():
    script = Script()
    script.before = only("store", B, lambda: fail(OSError(28, "No space left on device")))
    with drive(script) as tier:
        result = tier.store(rows(A, B, C))
        assert result.failed == (B,)
        assert result.missing == ()
        assert result.error is not None
        assert "'scripted'" in result.error
        assert "OSError: [Errno 28] No space left on device" in result.error
        assert tier.lookup([A, B, C]) == [True, False, True]
        script.before = lambda method, keys: None
        assert tier.store(rows(A, B, C)).error is None
        assert tier.load([A, B, C]).rows == rows(A, B, C)
    assert not script.violations


def test_c30_a_load_that_raises_fails_its_key_alone():
    script = Script()
    with drive(script) as tier:
        tier.store(rows(A, B, C))
        script.before = only("load", A, lambda: fail(ConnectionResetError("peer")))
        loaded = tier.load([A, B, D, C])
        assert loaded.result.failed == (A,)
        assert loaded.result.missing == (D,)
        assert loaded.rows == {B: row(2), C: row(3)}


class EndingError(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError(), EndingError()])
def test_c30_nothing_a_tier_raises_ends_an_io_thread(error):
    script = Script()
    script.before = only("store", A, lambda: fail(error))
    with drive(script, threads=1) as tier:
        assert tier.store(rows(A)).failed == (A,)
        assert tier.store(rows(B)).error is None


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_c30_an_error_without_readable_text_is_named_by_its_type():
    script = Script()
    script.before = only("store", A, lambda: fail(UnprintableError()))
    with drive(script) as tier:
        error = tier.store(rows(A)).error
        assert error is not None
        assert "UnprintableError" in error


def test_c53_long_texts_are_cut_and_url_users_are_masked():
    script = Script()
    script.before = only("store", A, lambda: fail(OSError("https://joe:hunter2@host/ " + "x" * 10_000)))
    with drive(script) as tier:
        error = tier.store(rows(A)).error
        assert error is not None
        assert "hunter2" not in error
        assert len(error) < 1000


@pytest.mark.parametrize("answer", [1, "yes", [True], np.True_])
def test_c30_a_load_must_return_a_bool(answer):
    script = Script()
    with drive(script) as tier:
        tier.store(rows(A))
        script.before = only("load", A, lambda: answer)
        result = tier.load([A]).result
        assert result.failed == (A,)
        assert result.error is not None
        assert "expected a bool" in result.error


@pytest.mark.parametrize("answer", [True, False, 0])
def test_c30_a_store_must_return_none(answer):
    script = Script()
    script.before = only("store", A, lambda: answer)
    with drive(script) as tier:
        assert tier.store(rows(A)).failed == (A,)
        assert tier.lookup([A]) == [False]


@pytest.mark.parametrize(
    "answer",
    [[], [True], [True, True, True], [True, 1], "no", b"no", {A: True}, iter([True, True]), np.ones(2, bool)],
)
def test_c30_contains_must_return_one_bool_a_key(answer):
    script = Script()
    script.before = only("contains", A, lambda: answer)
    with drive(script, info=ASKED) as tier:
        result = tier.wait(tier.start_lookup([A, B]))
        assert result.present is not None
        assert set(result.failed) in ({A, B}, {B})
        assert result.error is not None
        assert "contains" in result.error


class Lazy(Sequence):
    """An answer that is only made when it is looked at."""

    def __init__(self, length: Callable[[], Any], item: Callable[[int], object]) -> None:
        self._length = length
        self._item = item

    def __len__(self):
        return self._length()

    def __getitem__(self, index):
        return self._item(index)


class Pretender:
    """Says it is a bool, and has no truth."""

    __class__ = bool  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise OSError("no truth")


class Faceless:
    """Has no class, as far as can be asked."""

    @property  # type: ignore[misc]
    def __class__(self):
        raise OSError("no class")


# Made by the test alone: pytest, too, would stumble over some.
LAZY_FAULTS: dict[str, Callable[[], object]] = {
    "items that raise": lambda: Lazy(lambda: 2, lambda index: fail(OSError("lost"))),
    "items that end the thread": lambda: Lazy(lambda: 2, lambda index: fail(SystemExit(1))),
    "an item that raises": lambda: Lazy(lambda: 2, lambda index: index == 0 or fail(OSError("lost"))),
    "no end": lambda: Lazy(lambda: 2, lambda index: True),
    "one item": lambda: Lazy(lambda: 2, lambda index: index == 0 or fail(IndexError(index))),
    "liars": lambda: [Pretender(), Pretender()],
    "no class": Faceless,
    "items without class": lambda: [Faceless(), Faceless()],
    "errors without text": lambda: [EndingError(), EndingError()],
}
WRONG = {"a liar": Pretender, "no class": Faceless, "an error without text": EndingError}


@pytest.mark.parametrize("make", LAZY_FAULTS.values(), ids=LAZY_FAULTS)
@pytest.mark.parametrize("method", ["contains", "store_many", "load_many"])
def test_c30_an_answer_that_fails_when_it_is_read_ends_no_io_thread(method, make):
    script = Script()
    script.before = only(method, A, make)
    with drive(script, BatchTier, info=ASKED, threads=1) as tier:
        if method == "contains":
            result = tier.wait(tier.start_lookup([A, B]))
        elif method == "store_many":
            result = tier.store(rows(A, B))
        else:
            result = tier.load([A, B]).result
        assert set(result.failed) == {A, B}
        assert result.error is not None
        assert method in result.error
        assert tier.store(rows(C)).error is None
        assert tier.load([C]).rows == {C: row(1)}


def test_c30_an_answer_of_another_length_than_it_says_is_read_as_it_is():
    answer = Lazy(lambda: fail(OSError("no length")), lambda index: [True, False][index])
    script = Script()
    script.before = only("contains", A, lambda: answer)
    with drive(script, info=ASKED, threads=1) as tier:
        assert tier.lookup([A, B]) == [True, False]


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("method", ["load", "store", "delete", "close"])
def test_c30_whatever_a_call_returns_ends_no_io_thread(method, make):
    script = Script()
    with drive(script, threads=1, capacity_blocks=1) as tier:
        tier.store(rows(A))
        script.before = lambda called, keys: make() if called == method else None
        if method == "load":
            assert tier.load([A]).result.failed == (A,)
        else:
            assert tier.store(rows(B)).failed == (() if method == "close" else (B,))
        script.before = lambda called, keys: make() if called == method == "close" else None
        assert tier.store(rows(C)).error is None
    assert script.closed == [0]


def test_c30_a_contains_that_raises_fails_the_lookup_and_says_so():
    script = Script()
    script.before = only("contains", A, lambda: fail(TimeoutError("slow")))
    with drive(script, info=ASKED) as tier:
        result = tier.wait(tier.start_lookup([A, B]))
        assert result.present == (None, None)
        assert result.failed == (A, B)
        script.before = lambda method, keys: None
        assert tier.lookup([A, B]) == [False, False]


def test_c52_batches_have_an_outcome_a_key():
    script = Script()
    with drive(script, BatchTier) as tier:
        script.before = only("store_many", A, lambda: [True, OSError("disk"), False])
        result = tier.store(rows(A, B, C))
        assert result.failed == (B,)
        assert result.missing == (C,)  # declined
        assert tier.lookup([A, B, C]) == [True, False, False]
        script.before = lambda method, keys: None
        tier.store(rows(B, C))
        script.before = only("load_many", B, lambda: [False, OSError("disk")])
        loaded = tier.load([B, C])
        assert loaded.result.missing == (B,)
        assert loaded.result.failed == (C,)


@pytest.mark.parametrize("answer", [[True], [True] * 3, 1, "ab", [None, None]])
def test_c30_a_malformed_batch_answer_fails_the_batch(answer):
    script = Script()
    script.before = only("store_many", A, lambda: answer)
    with drive(script, BatchTier) as tier:
        assert tier.store(rows(A, B)).failed == (A, B)


def test_c30_a_batch_that_raises_fails_the_batch():
    script = Script()
    script.before = only("store_many", A, lambda: fail(ValueError("bad")))
    with drive(script, BatchTier) as tier:
        assert tier.store(rows(A, B)).failed == (A, B)
        assert tier.store(rows(C)).error is None


class KeepingTier(ScriptedTier):
    """Keeps the buffers it is given, and uses them later."""

    kept: list[memoryview]

    def store(self, key, block):
        self.kept.append(block)

    def load(self, key, into):
        self.kept.append(into)
        return True


def test_c29_a_buffer_that_a_tier_kept_is_dead_after_the_call():
    kept: list[memoryview] = []
    base = type("Keeping", (KeepingTier,), {"kept": kept})
    with drive(Script(), base) as tier:
        tier.store(rows(A))
        tier.load([A])
    for view in kept:
        with pytest.raises(ValueError, match="released"):
            view[0]


class ExportingTier(ScriptedTier):
    """Keeps an export of the buffers it is given."""

    kept: list[object]

    def store(self, key, block):
        self.kept.append(pickle.PickleBuffer(block))


def test_c29_a_buffer_that_cannot_be_taken_back_is_a_fault():
    base = type("Exporting", (ExportingTier,), {"kept": []})
    with drive(Script(), base) as tier:
        result = tier.store(rows(A))
        assert result.failed == (A,)
        assert result.error is not None
        assert "kept a reference" in result.error


class SlicingTier(ScriptedTier):
    """Keeps a slice of the buffers it is given."""

    kept: list[memoryview]

    def load(self, key, into):
        self.kept.append(into[:])
        return super().load(key, into)


def test_c29_a_slice_that_a_tier_kept_is_not_noticed_as_the_documentation_says():
    kept: list[memoryview] = []
    with drive(Script(), type("Slicing", (SlicingTier,), {"kept": kept})) as tier:
        tier.store(rows(A))
        assert tier.load([A]).rows == rows(A)
    assert kept[0] == row(1)
    assert "(``into[:]``) is not even noticed" in str(TierCalls.__doc__)


def test_c29_stores_can_not_write_to_the_pool():
    script = Script()

    class Writing(ScriptedTier):
        def store(self, key, block):
            block[0] = 0

    with drive(script, Writing) as tier:
        buffer = bytearray(row(7))
        result = tier.store({A: buffer})
        assert result.failed == (A,)
        assert buffer == row(7)


# Opening.


def test_c33_an_open_that_raises_is_a_tier_open_error_and_closes_what_was_begun():
    script = Script()
    script.before = lambda method, keys: (
        fail(PermissionError(13, "Permission denied")) if method == "open" else None
    )
    with pytest.raises(
        TierOpenError, match=r"'scripted' could not be opened: PermissionError.*Permission denied"
    ):
        drive(script)
    assert script.closed == [0]


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
@pytest.mark.parametrize("method", ["open", "scan"])
def test_c30_whatever_an_open_raises_what_was_begun_is_closed(method, error):
    script = Script()
    script.before = lambda called, keys: fail(error) if called == method else None
    with pytest.raises(TierOpenError, match=type(error).__name__):
        drive(script, ScanningTier)
    assert script.closed == [0]


@pytest.mark.parametrize("found", [[object()], 7, [None]])
def test_c30_a_scan_that_returns_nonsense_is_a_tier_open_error(found):
    script = Script()
    script.before = lambda method, keys: found if method == "scan" else None
    with pytest.raises(TierOpenError, match="could not be opened"):
        drive(script, ScanningTier)
    assert script.closed == [0]


def test_c30_a_tier_that_cannot_be_made_is_a_tier_open_error():
    script = Script()
    script.before = lambda method, keys: fail(RuntimeError("no")) if method == "init" else None
    with pytest.raises(TierOpenError, match="RuntimeError: no"):
        drive(script)


def test_c30_jobs_of_a_tier_that_is_not_open_fail_with_the_reason():
    tier = drive(Script())
    tier.shutdown()
    for result in (tier.store(rows(A)), tier.load([A]).result, tier.wait(tier.start_lookup([A]))):
        assert result.failed == (A,)
        assert result.error is not None
        assert "shut down" in result.error
    assert tier.store({}).error is None


def test_k5_o1_a_close_that_raises_is_logged_and_stops_nothing(caplog):
    script = Script()
    script.before = lambda method, keys: fail(RuntimeError("stuck")) if method == "close" else None
    tier = drive(script)
    job = tier.start_store(rows(A, B))
    with caplog.at_level(logging.WARNING):
        tier.shutdown()
    tier.wait(job)
    assert tier.unanswered() == set()
    assert "close: RuntimeError: stuck" in caplog.text


# Hanging.


def test_c31_a_call_that_hangs_holds_up_no_other_key():
    script = Script()
    gate = Gate("load", keys=[A])
    with drive(script, threads=2) as tier:
        tier.store(rows(A, B))
        script.before = gate
        hung = tier.start_load([A], [bytearray(ROW)])
        gate.wait_entered()
        assert tier.load([B]).rows == {B: row(2)}
        assert tier.store(rows(C)).error is None
        assert tier.unanswered() == {hung}
        gate.open()
        assert tier.wait(hung).error is None


def test_c31_c34_shutdown_is_bounded_and_names_the_job_that_may_touch_the_pool():
    script = Script()
    gate = Gate("load")
    tier = drive(script, threads=1)
    tier.store(rows(A))
    script.before = gate
    buffer = bytearray(ROW)
    hung = tier.start_load([A], [buffer])
    gate.wait_entered()
    queued = tier.start_store(rows(B))
    tier.shutdown(timeout_s=0.05)
    assert tier.wait(queued).failed == (B,)
    assert tier.drain(0.0) == [hung]
    assert script.closed == []
    gate.open()
    assert tier.wait(hung).error is None
    assert buffer == row(1)
    tier.shutdown()
    assert script.closed == [0]
    assert tier.drain(0.0) == []
    assert not script.violations
