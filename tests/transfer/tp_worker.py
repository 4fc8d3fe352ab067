"""One worker process of a tensor-parallel engine: joins the pool by name and stores and loads what it is told to.

Run as ``tp_worker.py NAME WORKER NUM_WORKERS NUM_ROWS``. Every line of its input is a command, every line of its
output an answer:

- ``store JOB STAMP ROW...``: fill block i with the stamp, store it to the i-th row; no answer
- ``load JOB ROW...``: load the i-th row into block i; answers with the stamp found there, or ``mixed``
- ``hold``: stop every later store in the middle of a row, and answer ``half`` there
- ``drain``: wait for all stores; answers how many were done
"""

import sys
from typing import Any

import torch

from kvtier_core.transfer import CPUDevice, Direction, GroupTransfer, KVLayout, Pool, PoolGeometry, cpu

PAGE_BYTES = 4096
LAYERS = 3
BLOCKS = 8
PART_BYTES = PAGE_BYTES * LAYERS
TIMEOUT_S = 60.0


def geometry_for(num_workers: int, num_rows: int) -> PoolGeometry:
    """Rows with room for every worker's part and one page more."""
    return PoolGeometry(num_rows=num_rows, row_bytes=num_workers * PART_BYTES + 4096, num_workers=num_workers)


def stamp_of(stamp: int, worker: int) -> int:
    """Each worker's own byte for a stamp."""
    return (stamp * 7 + worker * 3) % 251 + 1


class _Worker:
    def __init__(self, pool: Pool, worker: int) -> None:
        self._worker = worker
        self._kv = [torch.zeros(BLOCKS, PAGE_BYTES, dtype=torch.uint8) for _ in range(LAYERS)]
        self._device = CPUDevice(KVLayout(self._kv), pool, worker)
        self._jobs: list[int] = []

    def store(self, job: int, stamp: int, *rows: int) -> None:
        self._device.wait(Direction.STORE, self._jobs, TIMEOUT_S)  # before the blocks are used again
        for tensor in self._kv:
            tensor[:] = stamp_of(stamp, self._worker)
        self._jobs.append(job)
        parts = [GroupTransfer(block_ids=range(len(rows)), rows=rows)]
        self._device.submit(Direction.STORE, job, parts)

    def load(self, job: int, *rows: int) -> None:
        parts = [GroupTransfer(block_ids=range(len(rows)), rows=rows)]
        self._device.submit(Direction.LOAD, job, parts)
        assert self._device.wait(Direction.LOAD, [job], TIMEOUT_S)
        found = {value for tensor in self._kv for value in tensor[: len(rows)].unique().tolist()}
        self._answer(found.pop() if len(found) == 1 else "mixed")

    def hold(self) -> None:
        def copy_half(copies: Any) -> None:
            target, row, source, block = copies.popleft()
            target[row][:1] = source[block][:1]  # the first layer
            print("half", flush=True)
            sys.stdin.read()  # for ever: the test kills this process

        cpu._carry_out = copy_half

    def drain(self) -> None:
        assert self._device.wait(Direction.STORE, self._jobs, TIMEOUT_S)
        self._jobs.clear()
        stores = [result for result in self._device.get_finished() if result.direction is Direction.STORE]
        self._answer(sum(result.ok for result in stores))

    def _answer(self, *words: object) -> None:
        print(*words, flush=True)

    def close(self) -> None:
        assert self._device.shutdown(TIMEOUT_S)


def main(name: str, worker: int, num_workers: int, num_rows: int) -> None:
    pool = Pool.open(geometry_for(num_workers, num_rows), name, worker)
    print("joined", flush=True)
    served = _Worker(pool, worker)
    for line in sys.stdin:
        command, *numbers = line.split()
        getattr(served, command)(*map(int, numbers))
    served.close()
    assert pool.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
