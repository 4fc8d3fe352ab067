"""What a tier does to its process: what it connects to and writes, which threads and descriptors it leaves."""

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier_testing.calling import THREAD_NAME

_IO_EVENTS = frozenset(
    {
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.truncate",
        "socket.bind",
        "socket.connect",
        "socket.getaddrinfo",
        "sqlite3.connect",
        "subprocess.Popen",
    }
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class _Audit:
    """Python's audit events of a tier's calls. A hook for them stays as long as the process: there is one."""

    def __init__(self) -> None:
        self._is_hooked = False
        self._seen: set[str] | None = None

    def begin(self) -> set[str]:
        """The names of events from now on."""
        if not self._is_hooked:
            self._is_hooked = True
            sys.addaudithook(self._note)
        self._seen = set()
        return self._seen

    def end(self) -> None:
        """No more."""
        self._seen = None

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._seen is None or threading.current_thread().name != THREAD_NAME:
            return
        if event in _IO_EVENTS or (event == "open" and _writes(*arguments)):
            self._seen.add(event)


def _writes(path: object, mode: object, flags: object) -> bool:
    if "__pycache__" in str(path):
        return False
    if isinstance(mode, str):
        return not set("wax+").isdisjoint(mode)
    return isinstance(flags, int) and bool(flags & _WRITES)


_audit = _Audit()


@contextmanager
def watch_io() -> Iterator[set[str]]:
    """What a ``CallThread`` connects to or writes meanwhile, by the names of Python's audit events."""
    try:
        yield _audit.begin()
    finally:
        _audit.end()


def resources() -> Counter[str]:
    """How many threads and descriptors this process has, by kind or path."""
    found: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except OSError:
            continue  # closed meanwhile
        kind, _, number = target.partition(":")
        found[kind if number.startswith("[") else target] += 1
    found.update(
        f"thread {thread.name.rstrip('0123456789')}"
        for thread in threading.enumerate()
        if thread.name != THREAD_NAME
    )
    return found
