"""Threads that share a copy: every part once, all ended when it returns, and no waiting for a helper."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from kvtier_core.transfer.helpers import Helpers

TIMEOUT_S = 60.0


def _started(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def _ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(TIMEOUT_S)
    return not any(thread.is_alive() for thread in threads)


def _noting(done: list[int], number: int) -> Callable[[], None]:
    return lambda: done.append(number)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_part_is_carried_out_once(count: int) -> None:
    helpers = Helpers(count, "every-part")
    for _ in range(200):
        done: list[int] = []
        helpers.run([_noting(done, number) for number in range(4)])
        assert sorted(done) == [0, 1, 2, 3]
    threads = _started("every-part")
    assert len(threads) == count
    helpers.stop()
    assert not any(thread.is_alive() for thread in threads)


def test_two_parts_are_carried_out_at_once() -> None:
    helpers = Helpers(1, "at-once")
    meeting = threading.Barrier(2, timeout=TIMEOUT_S)

    def meet() -> None:
        meeting.wait()

    helpers.run([meet, meet])
    helpers.stop()


def test_a_busy_helper_is_not_waited_for() -> None:
    helpers = Helpers(1, "busy")
    begun, go_on = threading.Event(), threading.Event()

    def hold_up() -> None:
        begun.set()
        assert go_on.wait(TIMEOUT_S)

    other = threading.Thread(target=helpers.run, args=([lambda: begun.wait(TIMEOUT_S) and None, hold_up],))
    other.start()
    assert begun.wait(TIMEOUT_S)
    ran_on: list[int] = []
    helpers.run([lambda: None, lambda: ran_on.append(threading.get_ident())])
    assert ran_on == [threading.get_ident()]
    go_on.set()
    other.join(TIMEOUT_S)
    helpers.stop()


@pytest.mark.parametrize("who", ["own", "helper"])
def test_an_error_comes_out_when_no_part_runs_any_more(who: str) -> None:
    helpers = Helpers(1, "error")
    begun, ended = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        threading.Event().wait(0.05)
        ended.set()
        if who == "helper":
            raise KeyboardInterrupt("of a part")

    def own() -> None:
        assert begun.wait(TIMEOUT_S)
        if who == "own":
            raise KeyboardInterrupt("of a part")

    with pytest.raises(KeyboardInterrupt, match="of a part"):
        helpers.run([own, slow])
    assert ended.is_set()
    helpers.stop()


def test_after_an_error_nothing_begins_that_had_not() -> None:
    helpers = Helpers(0, "none")
    done: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        helpers.run([fail, _noting(done, 1)])
    assert done == []


class _Failed(Exception):  # noqa: N818 - of a part
    pass


@pytest.mark.parametrize("fails", [(), ("own",), ("helper",), ("own", "helper")])
@pytest.mark.parametrize("count", [0, 1])
def test_nothing_that_a_part_refers_to_is_kept_without_the_garbage_collector(
    count: int, fails: Sequence[str]
) -> None:
    helpers = Helpers(count, "keeping")
    rows = np.zeros(8)
    kept = weakref.ref(rows)

    def touch(array: np.ndarray, who: str) -> None:
        array[:] = 1
        if who in fails:
            raise _Failed(who)

    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            with contextlib.suppress(_Failed):
                helpers.run([partial(touch, rows, "own"), *[partial(touch, rows, "helper")] * 2])
        helpers.stop()
        helpers.stop()
        del rows
        assert kept() is None
    finally:
        gc.enable()


def test_threads_end_when_nobody_has_them_any_more() -> None:
    helpers = Helpers(2, "dropped")
    threads = _started("dropped")
    assert len(threads) == 2
    del helpers
    assert _ended(threads)


def test_no_thread_is_left_where_not_all_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def refuse_third(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_third)
        with pytest.raises(RuntimeError, match="can't start"):
            Helpers(3, "refused")
    assert not any(thread.is_alive() for thread in started)
