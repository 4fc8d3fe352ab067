"""Makes a tier's calls on a thread of its own, so that one that never returns fails its test and is named."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")

PATIENCE_S = 60.0
"""How long a tier may take to answer before its test fails: long, so that a busy machine fails none."""
THREAD_NAME = "kvtier-kit-calls"

_Orders = SimpleQueue[Callable[[], None] | None]


class HangError(AssertionError):
    """A call of the tier did not return. Whatever rule was tried, this one is broken."""

    rule = "Rule C31: Each call of a tier returns or raises. One that hangs takes a thread from the tier for good."
    advice = "Give every call of the storage's client a timeout, and hold no lock while another thread is waited for."

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what} did not return within {seconds:g} s")


class CallThread:
    """One thread for the calls of one tier, made one at a time. A call that hangs keeps the thread and no test.

    The thread ends when nobody has this object any more.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._hangs_in: str | None = None
        self._orders: _Orders = SimpleQueue()
        weakref.finalize(self, self._orders.put, None)
        threading.Thread(target=_serve, args=[self._orders], name=THREAD_NAME, daemon=True).start()

    @property
    def hangs(self) -> bool:
        """Whether a call has not returned in time."""
        return self._hangs_in is not None

    def call(self, what: str, work: Callable[[], _T], more_s: float = 0.0) -> _T:
        """What *work* returns or raises. Messages name it *what*. It may take *more_s* than any call."""
        assert self._hangs_in is None, f"{what} was not called, because {self._hangs_in} has not returned"
        answer: Future[_T] = Future()
        self._orders.put(partial(_answer, answer, work))
        if not wait([answer], self._patience_s + more_s).done:
            self._hangs_in = what
            raise HangError(what, self._patience_s + more_s)
        return answer.result()


def _serve(orders: _Orders) -> None:
    while (order := orders.get()) is not None:
        order()
        del order  # it has the tier


def _answer(answer: "Future[Any]", work: Callable[[], Any]) -> None:
    try:
        answer.set_result(work())
    except BaseException as error:  # noqa: BLE001 - it belongs to the caller
        answer.set_exception(error)
