"""What transfers cost the process that drives a GPU, with nothing to copy: host time by row, and a step beside them.

Streams and events are those of torch for a CPU, which do nothing, and the call that copies does nothing either. What is
measured is the rest: planning, queueing, threads. Where small pages are gathered, the CPU gathers pages of a few bytes.
"""

import random
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch

from kvtier_core.transfer import Direction, GroupTransfer, KVLayout, Pool, PoolGeometry, StreamDevice, streams

ROWS = 1000
NUM_BLOCKS = 4 * ROWS
"""And as many rows, so that those of a transfer are scattered."""
PAGE_BYTES = 16
STEP_LOOPS = 200_000
"""Of a step that is Python alone: 10 to 20 ms."""
TIMEOUT_S = 60.0


class _Event(torch.cpu.Event):
    def elapsed_time(self, _: "_Event") -> float:
        return 0.0


class _HostDevice(StreamDevice):
    def _event(self) -> _Event:
        return _Event()


class Bench:
    """A device over host memory, and transfers of ``ROWS`` rows through it."""

    def __init__(self, num_tensors: int, *, gathers: bool) -> None:
        row_bytes = -(-(num_tensors * PAGE_BYTES + 64) // 4096) * 4096  # 64: the proof
        self._pool = Pool.create(PoolGeometry(num_rows=NUM_BLOCKS, row_bytes=row_bytes))
        tensors = [torch.ones(NUM_BLOCKS, PAGE_BYTES, dtype=torch.uint8) for _ in range(num_tensors)]
        with patch.object(streams, "_GATHER_BELOW", 2 * PAGE_BYTES * gathers):
            self._device = _HostDevice(KVLayout(tensors), self._pool, copy_batch=lambda *_: None)
        self._chance = random.Random(0)
        self._job = 0

    def draw(self) -> list[GroupTransfer]:
        """Scattered blocks and rows."""
        blocks, rows = (self._chance.sample(range(NUM_BLOCKS), ROWS) for _ in range(2))
        return [GroupTransfer(block_ids=blocks, rows=rows)]

    def submit(self, *directions: Direction, parts: list[GroupTransfer]) -> None:
        """A job in each direction."""
        self._job += 1
        for direction in directions:
            self._device.submit(direction, self._job, parts)

    def finish(self) -> None:
        """Wait for all that was submitted."""
        for direction in Direction:
            assert self._device.wait(direction, [self._job], TIMEOUT_S)
        assert all(result.ok for result in self._device.get_finished())

    def close(self) -> None:
        """Give everything back."""
        assert self._device.shutdown(TIMEOUT_S)
        assert self._pool.close()


def us_per_row(bench: Bench, rounds: int) -> float:
    """Microseconds of processor time a row, of all threads, of the slower direction; the best of all rounds."""
    seconds: dict[Direction, list[float]] = {direction: [] for direction in Direction}
    for _ in range(rounds):
        for direction in Direction:
            parts = bench.draw()
            begun = time.process_time()
            bench.submit(direction, parts=parts)
            bench.finish()
            seconds[direction].append(time.process_time() - begun)
    return max(min(found) for found in seconds.values()) / ROWS * 1e6


def step_beside_copies(bench: Bench, rounds: int) -> float:
    """A step right after both directions were handed a job, over the step alone; the median of all rounds."""
    ratios = []
    for _ in range(rounds):
        alone = _time(_step)
        bench.submit(*Direction, parts=bench.draw())
        ratios.append(_time(_step) / alone)
        bench.finish()
    return statistics.median(ratios)


def _step() -> None:
    total = 0
    for number in range(STEP_LOOPS):
        total += number & 3
    assert total


def _time(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measure_host_time(rounds: int) -> dict[str, float]:
    """The figures that have goals, and the first with pages that are gathered."""
    found = {}
    for name, num_tensors, gathers in (
        ("1_tensor", 1, False),
        ("80_tensors", 80, False),
        ("80_tensors_gathered", 80, True),
    ):
        bench = Bench(num_tensors, gathers=gathers)
        try:
            found[f"us_per_row_{name}"] = us_per_row(bench, rounds)
            if num_tensors == 1:
                found["step_beside_copies"] = step_beside_copies(bench, rounds)
        finally:
            bench.close()
    return {name: round(value, 3) for name, value in found.items()}
