"""Descriptors that speak for this process alone: a forked child closes its copies.

Locks and bound sockets live as long as any process has them, and the other members count on their going with the
process that made them. A library that forks without Python's hooks escapes this.
"""

import os
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar
from weakref import WeakSet


class Closable(Protocol):
    """Closing it twice is fine, and closing a copy changes nothing for the process that has the original."""

    def close(self) -> None:
        """Let go of it."""
        ...


_Owned = TypeVar("_Owned", bound=Closable)
_guard = threading.RLock()
_owned: WeakSet[Closable] = WeakSet()


def own(make: Callable[[], _Owned]) -> _Owned:
    """What *make* returns; no fork falls between its making and its being known here. *make* must not block."""
    with _guard:
        owned = make()
        _owned.add(owned)
        return owned


def _close_copies() -> None:
    _guard.release()
    for owned in list(_owned):
        owned.close()
    _owned.clear()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_copies)
