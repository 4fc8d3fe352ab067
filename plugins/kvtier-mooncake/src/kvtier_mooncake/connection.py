"""Keeps one tier's client usable: lends it to threads, and puts a new one in the place of one that can't be trusted.

Mooncake gives a transfer up after 60 s, but does not take it back: if the other side was only stopped, its bytes still
come, into a row that may be another block's by then. So such a client is closed before anything is said of the load.
It gives no memory to the store, so no other process loses a block by that.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier_core import TierOpenError
from kvtier_mooncake.client import Client

_AGAIN_S = 1.0
"""Between two tries to connect: jobs that come in between fail at once."""


@dataclass(eq=False)
class _Lent:
    """A client, and how many threads are in a call on it."""

    client: Client
    users: int = 0
    is_closed: bool = False


class Connection:
    """The client of one tier, while there is one. Safe from any thread."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._changed = threading.Condition()  # guards all below
        self._current: _Lent | None = None
        self._failed: TierOpenError | None = None
        """Why the last try to connect failed."""
        self._again_at = 0.0

    def open(self) -> None:
        """Connect. Raises ``TierOpenError``."""
        with self._changed:
            self._current = _Lent(self._connect())

    @contextmanager
    def lend(self) -> Iterator[Client]:
        """The client, for one call. Connects where there is none. Raises ``TierOpenError``.

        A call that raises may go on behind our backs: its client is closed before the error is seen.
        """
        with self._changed:
            lent = self._current or self._open_again()
            lent.users += 1
        has_ended = False
        try:
            yield lent.client
            has_ended = True
        finally:
            with self._changed:
                lent.users -= 1
                self._changed.notify_all()
            if not has_ended:
                self._drop(lent)

    def _open_again(self) -> _Lent:
        if self._failed is not None and time.monotonic() < self._again_at:
            raise self._failed
        try:
            self._current = _Lent(self._connect())
        except TierOpenError as error:
            self._failed, self._again_at = error, time.monotonic() + _AGAIN_S
            raise
        self._failed = None
        return self._current

    def _drop(self, lent: _Lent) -> None:
        """Close a client that the caller has no call on. When this returns it moves no byte any more.

        Waits for the calls of others on it. The next call of all connects again.
        """
        with self._changed:
            if self._current is lent:
                self._current = None
            self._changed.wait_for(lambda: not lent.users)
            if not lent.is_closed:
                lent.is_closed = True
                lent.client.close()

    def close(self) -> None:
        """Close the client, if there is one, when its calls have ended."""
        with self._changed:
            lent = self._current
        if lent is not None:
            self._drop(lent)
