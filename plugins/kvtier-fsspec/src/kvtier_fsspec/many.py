"""Calls one method of a file system for many paths; together where the file system is asynchronous.

Decides how many requests are under way at a time. Decides nothing about their outcomes.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import sync


class Requests:
    """At most *at_once* of its requests are under way, however many threads call it. Safe in a forked child."""

    def __init__(self, at_once: int) -> None:
        """No I/O."""
        self._at_once = at_once
        # Of the one event loop that a process has; touched on that loop alone.
        self._free: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def call_each(
        self, fs: AbstractFileSystem, method: str, paths: Sequence[str], **arguments: object
    ) -> list[Any]:
        """The result of ``fs.method(path, **arguments)`` for each path, or the exception it raised, in order.

        On the event loop of an asynchronous file system; of any other, one after the other on the caller's thread.
        """
        if fs.async_impl:
            return self.gather(fs.loop, partial(getattr(fs, f"_{method}"), **arguments), paths)
        outcomes: list[Any] = []
        for path in paths:
            try:
                outcomes.append(getattr(fs, method)(path, **arguments))
            except Exception as error:  # noqa: BLE001 - for the caller, who tells absence from faults
                outcomes.append(error)
        return outcomes

    def gather(self, loop: Any, call: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:  # noqa: ANN401 - an event loop, and a coroutine function
        """The result of ``await call(part)`` on *loop* for each part, or the exception it raised, in order."""
        gathered: list[Any] = sync(loop, self._gather, call, parts)
        return gathered

    async def _gather(self, call: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
        loop = asyncio.get_running_loop()
        if self._free is None or self._free[0] is not loop:
            self._free = loop, asyncio.Semaphore(self._at_once)
        free = self._free[1]

        async def one(part: Any) -> object:  # noqa: ANN401 - as above
            async with free:
                return await call(part)

        return await asyncio.gather(*map(one, parts), return_exceptions=True)
