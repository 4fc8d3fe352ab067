"""What is left of an error once it was caught (K8): words, and no hold on the rows of the job that it came from."""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator

import pytest

from kvtier_core.manager.guard import Guard, TierIdentity


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Without the garbage collector circles stay, as they may for long in an engine."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def plainly() -> None:
    raise ValueError("once")


def with_a_cause() -> None:
    try:
        plainly()
    except ValueError as error:
        raise OSError("because of it") from error


def while_cleaning_up() -> None:
    try:
        plainly()
    finally:
        raise OSError("clean-up failed too")


class LockedError(Exception):
    """Lets nobody look at where it came from."""

    def _refuse(self, *_: object) -> None:
        raise OSError("looked at")

    __cause__ = __context__ = __traceback__ = property(_refuse, _refuse)


def with_locks() -> None:
    raise LockedError


def in_a_group() -> None:
    errors: list[Exception] = []
    for raiser in (with_a_cause, while_cleaning_up):
        with contextlib.suppress(KeyError):
            try:
                raiser()
            except OSError as error:
                errors.append(error)
    raise ExceptionGroup("several", errors)


@pytest.mark.parametrize("raiser", [plainly, with_a_cause, while_cleaning_up, with_locks, in_a_group])
@pytest.mark.parametrize("hook", ["lookup", "submit_store", "submit_load", "on_new_request"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_k8_a_hook_that_raised_once_does_not_keep_the_mapping(make_bench, caplog, hook, raiser, is_kept):
    caplog.set_level(logging.DEBUG, "kvtier")  # tracebacks are logged, and keep nothing either
    bench = make_bench()
    bench.new("a")
    bench.store("a", 1, 2)
    bench.settle()
    bench.evict_all()
    bench.manager.coordinator.state.tiers["one"].presence.clear()  # so that it is asked
    kept: list[BaseException] = []
    tier = bench.tiers["one"]

    def raise_it(tier_hook: str, request: object = None) -> None:
        if tier_hook == hook:
            row = bench.pool.row(0)  # as a tier's own frame holds a job's rows
            try:
                raiser()
            except BaseException as error:
                if is_kept:
                    kept.append(error)
                assert row
                raise

    tier._enter = raise_it
    bench.new("b")
    bench.load("b", 1, 2)
    bench.store("b", 3)
    bench.settle()
    del tier._enter
    assert bench.manager.shutdown(10)
    assert bench.pool.close(), "something still holds a row"


def test_k8_an_error_that_is_its_own_context_does_not_hang_the_guard():
    identity = TierIdentity(name="a", type="t", distribution="d", version="1")
    guard = Guard(identity, (), logging.getLogger("kvtier"))
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one

    def fail() -> None:
        raise one

    caller: Callable[[], None] = fail
    assert guard.call("lookup", caller).text == "lookup raised ValueError: one"


@pytest.mark.parametrize("begins_at", range(1980, 2003))
def test_no_part_of_a_secret_is_told_where_a_long_text_is_cut(begins_at: int) -> None:
    identity = TierIdentity(name="a", type="t", distribution="d", version="1")
    guard = Guard(identity, ("sesame-open",), logging.getLogger("kvtier"))
    told = guard.mask("x" * begins_at + "sesame-open" + "y" * 10_000)
    assert "se" not in told
    assert told.endswith("...")
    assert len(told) == 2003


@pytest.mark.parametrize("secret", ["sesame-open", "open sesame", "sesame" * 1500])
@pytest.mark.parametrize("between", [" ", ", ", "", " and "])
@pytest.mark.parametrize("first", ["", "x ", "https://user:sesame-open"])
def test_no_part_of_a_secret_is_told_where_the_reading_of_a_long_text_ends(secret, between, first):
    identity = TierIdentity(name="a", type="t", distribution="d", version="1")
    guard = Guard(identity, (secret,), logging.getLogger("kvtier"))
    for shift in range(14):
        told = guard.mask(first + "@" * bool(first) + "z" * shift + (between + secret) * 3000)
        assert "se" not in told, told[-80:]
        assert "op" not in told, told[-80:]
