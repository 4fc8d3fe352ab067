"""Calls one method of a file system for many paths; together where the file system is asynchronous.

Decides how many requests are under way at a time. Decides nothing about their outcomes.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import sync


def call_for_each(
    fs: AbstractFileSystem, method: str, paths: Sequence[str], at_once: int, **arguments: object
) -> list[Any]:
    """The result of ``fs.method(path, **arguments)`` for each path, or the exception it raised, in order.

    At most *at_once* calls run together on the event loop of an asynchronous file system; of any other, one.
    """
    if fs.async_impl:
        gathered: list[Any] = sync(fs.loop, _gather, getattr(fs, f"_{method}"), paths, at_once, arguments)
        return gathered
    outcomes: list[Any] = []
    for path in paths:
        try:
            outcomes.append(getattr(fs, method)(path, **arguments))
        except Exception as error:  # noqa: BLE001 - for the caller, who tells absence from faults
            outcomes.append(error)
    return outcomes


async def _gather(
    call: Callable[..., Coroutine[Any, Any, Any]],
    paths: Sequence[str],
    at_once: int,
    arguments: Mapping[str, object],
) -> list[Any]:
    free = asyncio.Semaphore(at_once)

    async def one(path: str) -> object:
        async with free:
            return await call(path, **arguments)

    return await asyncio.gather(*map(one, paths), return_exceptions=True)
