"""Threads that carry out parts of one copy beside the thread that was asked for it.

Decides nothing about the parts. A part that no helper has begun when the asking thread is through with its own is done
by that one: nobody ever waits for a helper to wake up, or for one that is busy with another copy. Nothing that a part
refers to is kept after its end: not by the queue, and not by an error and the frames it came through.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue


class _Part:
    """Work for a helper, or for the thread that asked for it, whoever takes it first."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._taking = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def carry_out(self) -> None:
        """On a helper: do the work, unless it was taken back."""
        work = self._take()
        if work is None:
            return
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where the whole copy was asked for
            self._error = error
        finally:
            del work
            self._ended.set()

    def take_back(self) -> Callable[[], None] | None:
        """The work, if nobody has begun it: it ends with this."""
        work = self._take()
        if work is not None:
            self._ended.set()
        return work

    def wait(self) -> BaseException | None:
        """Until the work has ended; what it raised, told once."""
        self._ended.wait()
        error, self._error = self._error, None
        return error

    def _take(self) -> Callable[[], None] | None:
        with self._taking:
            work, self._work = self._work, None
        return work


_Queue = SimpleQueue[_Part | None]


class Helpers:
    """*count* daemon threads, perhaps none. They end with ``stop``, or when nobody has this object any more."""

    def __init__(self, count: int, name: str) -> None:
        """Raises ``RuntimeError`` where no more threads can be had; none is left then."""
        self._queue: _Queue = SimpleQueue()
        self._end = weakref.finalize(self, _end, self._queue, count)
        self._threads: list[threading.Thread] = []
        try:
            for number in range(count):
                thread = threading.Thread(
                    target=_serve, args=(self._queue,), name=f"{name}-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.stop()
            raise

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._threads)

    def stop(self) -> None:
        """End the threads, after the last ``run``. Twice is fine."""
        self._end()
        for thread in self._threads:
            thread.join()

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Carry out all *works*, the first on this thread. Returns when all have ended, or raises what one raised.

        When it raises, none runs any more either, and not all need have begun.
        """
        own, *others = works
        parts = [_Part(work) for work in others]
        try:
            if self._threads:
                for part in parts:
                    self._queue.put(part)
            own()
            for part in parts:
                if (work := part.take_back()) is not None:
                    work()
        finally:
            for part in parts:
                part.take_back()
            errors = [error for error in [part.wait() for part in parts] if error is not None]
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # an error whose frames refer to it would stay, and so would all that they refer to


def _serve(queue: _Queue) -> None:
    while (part := queue.get()) is not None:
        part.carry_out()


def _end(queue: _Queue, count: int) -> None:
    for _ in range(count):
        queue.put(None)
