"""Threads that carry out parts of one copy beside the thread that was asked for it.

Decides nothing about the parts. A part that no helper has begun when the asking thread is through with its own is done
by that one: nobody ever waits for a helper to wake up, or for one that is busy with another copy.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue

_Part = tuple[Future[None], Callable[[], None]]
_Queue = SimpleQueue[_Part | None]


class Helpers:
    """*count* daemon threads, perhaps none. They end with ``stop``, or when nobody has this object any more."""

    def __init__(self, count: int, name: str) -> None:
        """Raises ``RuntimeError`` where no more threads can be had; none is left then."""
        self._queue: _Queue = SimpleQueue()
        self._end = weakref.finalize(self, _end, self._queue, count)
        self._threads = [
            threading.Thread(target=_serve, args=(self._queue,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._threads)

    def stop(self) -> None:
        """End the threads, after the last ``run``: nothing of any part is kept then. Twice is fine."""
        self._end()
        for thread in self._threads:
            thread.join()

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Carry out all *parts*, the first on this thread. Returns when all have ended, or raises what one raised.

        When it raises, none runs any more either.
        """
        own, *others = parts
        offered: list[_Part] = [(Future(), part) for part in others]
        try:
            for item in offered:
                self._queue.put(item)
            own()
            for future, part in offered:
                if future.cancel():
                    part()
        finally:
            begun = [future for future, _ in offered if not future.cancel()]
            wait(begun)
        for future in begun:
            future.result()


def _serve(queue: _Queue) -> None:
    while _do_next(queue):
        pass


def _do_next(queue: _Queue) -> bool:
    # In a function of its own: what a part holds, rows of the pool among it, is not kept until the next one comes.
    item = queue.get()
    if item is None:
        return False
    future, part = item
    if future.set_running_or_notify_cancel():
        try:
            part()
        except BaseException as error:  # noqa: BLE001 - raised where the whole copy was asked for
            future.set_exception(error)
        else:
            future.set_result(None)
    return True


def _end(queue: _Queue, count: int) -> None:
    for _ in range(count):
        queue.put(None)
