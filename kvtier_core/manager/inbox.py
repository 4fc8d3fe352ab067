"""A tier's inbox: what its hook thread is to do next, and how far it is behind. Bounded where the tier is stuck.

Jobs are bounded by their limits and the breakers, so they always get in. News (a request began, a block was used) is
not: when the tier is more than ``max_waiting`` calls behind, it is not told of new requests, and gets no jobs for
requests it was not told of (C26).
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue


class Inbox:
    """Calls for one hook thread. Safe from any thread."""

    def __init__(self, max_waiting: int) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._known: set[str] = set()
        """Requests that the tier has been told of and that are not over."""
        self._is_wake_pending = False

    def put(self, call: Callable[[], None]) -> None:
        """Add a call, whatever waits already."""
        self._calls.put(call)

    def put_news(self, call: Callable[[], None]) -> None:
        """Add a call that may be left out when the tier is far behind."""
        if self._calls.qsize() < self._max_waiting:
            self._calls.put(call)

    def begin_request(self, request_id: str, call: Callable[[], None]) -> None:
        """Add the news that a request began, unless the tier is far behind."""
        if self._calls.qsize() < self._max_waiting:
            with self._lock:
                self._known.add(request_id)
            self._calls.put(call)

    def end_request(self, request_id: str, call: Callable[[], None]) -> None:
        """Add the news that a request is over, if the tier was told of its beginning."""
        with self._lock:
            was_known = request_id in self._known
            self._known.discard(request_id)
        if was_known:
            self._calls.put(call)

    def knows(self, request_id: str) -> bool:
        """Whether the tier was told of this request, and not yet of its end."""
        with self._lock:
            return request_id in self._known

    def wake(self) -> None:
        """Let ``get`` return; one pending wake is enough, however often it is asked for."""
        with self._lock:
            if self._is_wake_pending:
                return
            self._is_wake_pending = True
        self._calls.put(None)

    def get(self, timeout_s: float | None) -> Callable[[], None] | None:
        """The next call; ``None`` after *timeout_s*, or when woken."""
        try:
            call = self._calls.get(timeout=timeout_s)
        except Empty:
            return None
        if call is None:
            with self._lock:
                self._is_wake_pending = False
        return call
