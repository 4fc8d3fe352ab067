"""A tier's inbox: what its hook thread is to do next, and how far it is behind. Bounded where the tier is stuck.

Jobs are bounded by their limits and the breakers, so they always get in. News (a request began, a block was used) is
not: a tier more than ``max_waiting`` calls behind gets no new requests, and no jobs of requests it does not know (C26).

An id may be used again while the news of its request's end still waits for the last rows to be sealed. Calls for the
later request are held back until then, so a tier never knows two requests of one id. The ``RequestInfo`` object, one
for each request's life, says which request a call is for.
"""

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from kvtier_core.values import RequestInfo

Call = Callable[[], None]

MAX_WAITING = 10_000
"""Calls that may wait for a hook thread before its tier gets no new requests: some MiB, and minutes of a slow tier."""


class CallQueue:
    """Calls for one thread of a tier. Safe from any thread."""

    def __init__(self, max_waiting: int) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._max_waiting = max_waiting
        self._num_held_back = 0
        self._lock = threading.Lock()
        self._is_wake_pending = False

    def put(self, call: Call) -> None:
        """Add a call, whatever waits already."""
        self._calls.put(call)

    def put_news(self, call: Call) -> None:
        """Add a call that may be left out when the tier is far behind."""
        if not self._is_far_behind():
            self._calls.put(call)

    def _is_far_behind(self) -> bool:
        return self._calls.qsize() + self._num_held_back >= self._max_waiting

    def wake(self) -> None:
        """Let ``get`` return; one pending wake is enough, however often it is asked for."""
        with self._lock:
            if self._is_wake_pending:
                return
            self._is_wake_pending = True
        self._calls.put(None)

    def get(self, timeout_s: float | None) -> Call | None:
        """The next call; ``None`` after *timeout_s*, or when woken."""
        try:
            call = self._calls.get(timeout=timeout_s)
        except Empty:
            return None
        if call is None:
            with self._lock:
                self._is_wake_pending = False
        return call


class Inbox(CallQueue):
    """Calls for a hook thread, in the order in which requests begin and end."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__(max_waiting)
        self._lives: dict[str, deque[tuple[RequestInfo, list[Call]]]] = {}
        """By id: requests that the tier was told of, or will be, and that are not over. The first is current,
        the others wait for its end, each with its calls so far."""

    def begin_request(self, request: RequestInfo, call: Call) -> None:
        """Add the news that a request began, unless the tier is far behind."""
        with self._lock:
            if not self._is_far_behind():
                self._lives.setdefault(request.request_id, deque()).append((request, []))
                self._put_for(request, call)

    def put_job(self, request: RequestInfo, call: Call) -> bool:
        """Add a job of *request*; False, and nothing added, when the tier was not told of it."""
        with self._lock:
            return self._put_for(request, call)

    def _put_for(self, request: RequestInfo, call: Call) -> bool:
        for place, (told, held_back) in enumerate(self._lives.get(request.request_id, ())):
            if told is not request:
                continue
            if place == 0:
                self._calls.put(call)
            else:
                held_back.append(call)
                self._num_held_back += 1
            return True
        return False

    def end_request(self, request: RequestInfo, call: Call) -> None:
        """Add the news that a request is over, if the tier was told of its beginning, and what it held back."""
        with self._lock:
            lives = self._lives.get(request.request_id)
            if lives is None or lives[0][0] is not request:
                return
            self._calls.put(call)
            lives.popleft()
            if not lives:
                del self._lives[request.request_id]
                return
            _, held_back = lives[0]
            for waiting in held_back:
                self._calls.put(waiting)
            self._num_held_back -= len(held_back)
            held_back.clear()
