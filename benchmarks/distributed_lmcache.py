"""Run by ``distributed.py`` in an interpreter that has LMCache: its own client of such servers, told what to move.

One JSON object a line comes in, one goes out. The client is what LMCache's ``resp://`` connector calls. It gets half of
the blocks at a time, as our tier does, and gathers and checks nothing.
"""

import asyncio
import json
import mmap
import os
import sys
import threading
import time
from typing import Any

import numpy as np

_TELL = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever LMCache prints must not end up between the answers


class Mover:
    """The client, and the blocks that it moves."""

    def __init__(self, shape: dict[str, int]) -> None:
        from lmcache.v1.storage_backend.native_clients.resp_client import RESPClient  # noqa: PLC0415 - after stdout

        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        size, count = shape["row_bytes"], shape["count"]
        memory = mmap.mmap(-1, count * size)
        np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, count * size, np.uint8)
        self._rows = [memoryview(memory)[begin : begin + size] for begin in range(0, count * size, size)]
        self._loop = loop
        self._client = asyncio.run_coroutine_threadsafe(self._connect(RESPClient, shape), loop).result()

    @staticmethod
    async def _connect(client: Any, shape: dict[str, int]) -> Any:  # noqa: ANN401 - it has no annotations
        return client("127.0.0.1", shape["port"], shape["threads"])

    async def _move(self, what: str, names: list[str]) -> None:
        move = self._client.batch_set if what == "store" else self._client.batch_get
        half = -(-len(names) // 2)
        for part in (slice(0, half), slice(half, None)):
            await move(names[part], self._rows[part])

    def move(self, what: str, keys: list[str]) -> dict[str, float]:
        """Store or load all blocks, and wait."""
        names = [f"lmcache:{key}" for key in keys]
        cpu_s, started = time.process_time(), time.perf_counter()
        asyncio.run_coroutine_threadsafe(self._move(what, names), self._loop).result()
        return {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu_s}


def answer(data: dict[str, float]) -> None:
    """One line back."""
    _TELL.write(json.dumps(data) + "\n")
    _TELL.flush()


def main() -> None:
    """Serve until the pipe ends."""
    mover = Mover(json.loads(sys.stdin.readline()))
    answer({})
    for line in sys.stdin:
        order = json.loads(line)
        # What it stored, the contender after it removes.
        answer({} if order["what"] == "clear" else mover.move(order["what"], order["keys"]))


if __name__ == "__main__":
    main()
