"""Measures device transfers beside the limit and beside what a user would write, in one run.

``python benchmarks/transfer.py --json``; it needs torch and numpy only. Every round draws new block ids and rows,
so that nothing is warm that would not be in an engine, and runs all contestants in a random order:

- *limit*: one memcpy (on a GPU: one copy to or from pinned memory) of as many bytes in one piece;
- *kvtier*: the device, from submit to the end of the wait, planning and threads included;
- *loop*: ``copy_`` a page;
- *index*: ``index_select`` or ``index_copy_`` a layer.

``--host-time`` measures what a GPU's transfers cost its process instead (``transfer_host_time.py``).

Times are the best of all rounds: other programs on the machine only ever add to them. A case's ratio is the limit's
time by kvtier's; a reported ratio is the median over the cases of at least ``RATIO_BYTES``.
"""

import argparse
import gc
import itertools
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transfer_host_time import measure_host_time

from kvtier_core.transfer import (
    CPUDevice,
    CUDADevice,
    Device,
    Direction,
    GroupTransfer,
    KVLayout,
    Pool,
    PoolGeometry,
)
from kvtier_core.transfer.plan import TransferLimits, plan_transfer

LAYERS = 32
PAGE_BYTES = [2 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20]
BLOCKS = [1, 16, 128, 512, 1024]
MAX_BYTES = 128 << 20
"""Of one transfer."""
RATIO_BYTES = 8 << 20
CUDA_GOAL_PAGE_BYTES = 16 << 10
MEMORY_FACTOR = 4
"""Blocks there are for each block moved, and rows for each row."""
TIMEOUT_S = 60.0
SLOW, SLOW_ROUNDS = {"loop", "index"}, 3
"""They need no more to show how far behind they are."""


@dataclass
class Case:
    """One geometry in one direction, and the seconds each contestant took, by round."""

    device: str
    layout: str
    page_bytes: int
    blocks: int
    direction: Direction
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Moved by each contestant."""
        return self.blocks * LAYERS * self.page_bytes

    @property
    def ratio(self) -> float:
        """Ours over the limit."""
        return min(self.seconds["limit"]) / min(self.seconds["kvtier"])

    def rate(self, contestant: str) -> float:
        """GB/s, of the best round."""
        return self.bytes / min(self.seconds[contestant]) / 1e9

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "device": self.device,
            "layout": self.layout,
            "page_bytes": self.page_bytes,
            "blocks": self.blocks,
            "direction": self.direction.value,
            "ratio": round(self.ratio, 3),
            "gb_per_s": {name: round(self.rate(name), 2) for name in self.seconds},
        }


class Memory:
    """The KV, the pool, a device between them, and one piece of memory for the limit."""

    def __init__(self, place: str, layout: str, page_bytes: int, blocks: int) -> None:
        self.place = place
        self.block_bytes = LAYERS * page_bytes
        self.num_blocks = max(MEMORY_FACTOR * blocks, 8)
        pages = [LAYERS * page_bytes] if layout == "block_major" else [page_bytes] * LAYERS
        self.tensors = [torch.ones(self.num_blocks, size, dtype=torch.uint8, device=place) for size in pages]
        self.plain = torch.ones(self.num_blocks * self.block_bytes, dtype=torch.uint8, device=place)
        row_bytes = self.block_bytes + 4096  # the proof, and padding to a page
        self.pool = Pool.create(PoolGeometry(num_rows=self.num_blocks, row_bytes=row_bytes), huge_pages=True)
        self.pool.prefault().wait(
            TIMEOUT_S
        )  # as an engine's, which is in huge pages where the kernel gives them
        self.pool.rows_array[:] = 1
        self.rows = torch.from_numpy(self.pool.rows_array)
        kind = CUDADevice if place == "cuda" else CPUDevice
        self.device: Device = kind(KVLayout(self.tensors), self.pool)
        self.streams = [torch.cuda.Stream() for _ in Direction] if place == "cuda" else []  # type: ignore[no-untyped-call]
        self.pinned = torch.ones(blocks * self.block_bytes, dtype=torch.uint8, pin_memory=place == "cuda")
        self._job = 0
        self._offset = 0

    def close(self) -> None:
        """Give everything back."""
        self.device.shutdown(TIMEOUT_S)
        del self.rows
        gc.collect()
        assert self.pool.close()

    def limit(self, direction: Direction, blocks: Sequence[int], _rows: Sequence[int]) -> None:
        """One copy, of another stretch each time."""
        size = len(blocks) * self.block_bytes
        self._offset = (self._offset + size) % (len(self.plain) - size + 1) // 64 * 64
        plain = self.plain[self._offset : self._offset + size]
        if self.place == "cuda":
            copy_pinned(direction, plain, self.pinned)
            torch.cuda.synchronize()
            return
        host = self.pool.rows_array.reshape(-1)[self._offset : self._offset + size]
        np.copyto(*((host, plain.numpy()) if direction is Direction.STORE else (plain.numpy(), host)))

    def limit_both(self, blocks: Sequence[int]) -> None:
        """Two copies at once, one a direction, each of its own memory."""
        half = len(blocks) * self.block_bytes // 2
        for stream, direction, begin in zip(self.streams, Direction, (0, half), strict=True):
            with torch.cuda.stream(stream):
                copy_pinned(direction, self.plain[begin : begin + half], self.pinned[begin : begin + half])
        torch.cuda.synchronize()

    def kvtier_both(self, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """A store and a load at once, of half of the blocks each."""
        half = len(blocks) // 2
        self._job += 1
        self.device.submit(
            Direction.STORE, self._job, [GroupTransfer(block_ids=blocks[:half], rows=rows[:half])]
        )
        self.device.submit(
            Direction.LOAD, self._job, [GroupTransfer(block_ids=blocks[half:], rows=rows[half:])]
        )
        for direction in Direction:
            assert self.device.wait(direction, [self._job], TIMEOUT_S)
        assert all(result.ok for result in self.device.get_finished())

    def kvtier(self, direction: Direction, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """The device under test."""
        self._job += 1
        parts = [GroupTransfer(block_ids=blocks, rows=rows)]
        self.device.submit(direction, self._job, parts)
        assert self.device.wait(direction, [self._job], TIMEOUT_S)
        assert all(result.ok for result in self.device.get_finished())

    def loop(self, direction: Direction, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """A ``copy_`` a page."""
        for block, row in zip(blocks, rows, strict=True):
            offset = 0
            for tensor in self.tensors:
                page = tensor[block]
                place = self.rows[row, offset : offset + len(page)]
                if direction is Direction.STORE:
                    place.copy_(page)
                else:
                    page.copy_(place)
                offset += len(page)
        self._synchronize()

    def index(self, direction: Direction, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """An ``index_select`` a layer, and one more to get the bytes to their places."""
        block_ids, row_ids = torch.tensor(blocks, device=self.place), torch.tensor(rows)
        offset = 0
        for tensor in self.tensors:
            places = self.rows[:, offset : offset + tensor.shape[1]]
            if direction is Direction.STORE:
                places.index_copy_(0, row_ids, tensor.index_select(0, block_ids).cpu())
            else:
                tensor.index_copy_(0, block_ids, places.index_select(0, row_ids).to(self.place))
            offset += tensor.shape[1]
        self._synchronize()

    def _synchronize(self) -> None:
        if self.place == "cuda":
            torch.cuda.synchronize()


def copy_pinned(direction: Direction, device: torch.Tensor, host: torch.Tensor) -> None:
    """Queue one copy on the current stream."""
    target, source = (host, device) if direction is Direction.STORE else (device, host)
    target.copy_(source, non_blocking=True)


def measure_both(page_bytes: int, blocks: int, rounds: int) -> float:
    """Our time over the limit's with both directions at once, layer-major, on a GPU."""
    memory = Memory("cuda", "layer_major", page_bytes, blocks)
    chance = random.Random(0)
    seconds: dict[str, list[float]] = {"limit": [], "kvtier": []}
    try:
        for _ in range(rounds + 1):
            ids, rows = (chance.sample(range(memory.num_blocks), blocks) for _ in range(2))
            begun = time.perf_counter()
            memory.limit_both(ids)
            between = time.perf_counter()
            memory.kvtier_both(ids, rows)
            seconds["limit"].append(between - begun)
            seconds["kvtier"].append(time.perf_counter() - between)
    finally:
        memory.close()
    return min(seconds["limit"]) / min(seconds["kvtier"])


def measure(place: str, layout: str, page_bytes: int, blocks: int, rounds: int) -> Iterator[Case]:
    """Both directions of one geometry."""
    memory = Memory(place, layout, page_bytes, blocks)
    contestants: list[Callable[..., None]] = [memory.limit, memory.kvtier, memory.loop, memory.index]
    chance = random.Random(0)
    try:
        for direction in Direction:
            case = Case(place, layout, page_bytes, blocks, direction)
            for round_ in range(-1, rounds):
                chance.shuffle(contestants)
                for contestant in contestants:
                    if contestant.__name__ in SLOW and round_ >= SLOW_ROUNDS:
                        continue
                    ids = chance.sample(range(memory.num_blocks), blocks)
                    rows = chance.sample(range(memory.num_blocks), blocks)
                    begun = time.perf_counter()
                    contestant(direction, ids, rows)
                    seconds = time.perf_counter() - begun
                    if round_ >= 0:  # the first one warms up
                        case.seconds.setdefault(contestant.__name__, []).append(seconds)
            yield case
    finally:
        contestants.clear()
        memory.close()


def plan_1000_us(rounds: int = 200) -> float:
    """Microseconds to plan a transfer of 1,000 scattered blocks, the best of all rounds."""
    chance = random.Random(0)
    limits = TransferLimits(num_blocks=(4000,), num_rows=4000)
    seconds = []
    for _ in range(rounds):
        part = GroupTransfer(
            block_ids=chance.sample(range(4000), 1000), rows=chance.sample(range(4000), 1000)
        )
        begun = time.perf_counter()
        plan_transfer(Direction.STORE, [part], limits)
        seconds.append(time.perf_counter() - begun)
    return min(seconds) * 1e6


def ratios(cases: Sequence[Case]) -> dict[str, float]:
    """The figures that have goals, and more of their kind."""
    groups: dict[str, list[float]] = {}
    for case in cases:
        if case.bytes < RATIO_BYTES:
            continue
        page = f"{case.page_bytes >> 10}KiB"
        layout = case.layout if case.layout == "block_major" else f"{case.layout}_{page}"
        groups.setdefault(f"{case.device}_{layout}_{case.direction.value}", []).append(case.ratio)
        if case.device == "cuda" and case.page_bytes >= CUDA_GOAL_PAGE_BYTES:
            groups.setdefault(f"cuda_{case.direction.value}", []).append(case.ratio)
    return {name: round(statistics.median(found), 3) for name, found in groups.items()}


def print_table(cases: Sequence[Case]) -> None:
    """For people: GB/s of every contestant."""
    names = ["limit", "kvtier", "loop", "index"]
    print("| device | layout | page | blocks | direction |", " | ".join(names), "| ratio |")
    print("|---" * (6 + len(names)) + "|")
    for case in cases:
        rates = " | ".join(f"{case.rate(name):.2f}" for name in names)
        print(
            f"| {case.device} | {case.layout} | {case.page_bytes >> 10} KiB | {case.blocks} | {case.direction.value} | "
            f"{rates} | {case.ratio:.2f} |"
        )


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="rounds a case (default 15)")
    parser.add_argument("--host-time", action="store_true", help="measure the host's time, without copies")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in an engine's worker; two threads on busy cores wait for each other
    if args.host_time:
        figures = measure_host_time(args.rounds)
        print(
            json.dumps(figures) if args.json else "\n".join(f"{name}: {it}" for name, it in figures.items())
        )
        return
    cases: list[Case] = []
    for place in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for page_bytes, blocks in itertools.product(PAGE_BYTES, BLOCKS):
            if blocks * LAYERS * page_bytes <= MAX_BYTES:
                for layout in ("block_major", "layer_major"):
                    cases += measure(place, layout, page_bytes, blocks, args.rounds)
    found = ratios(cases)
    if torch.cuda.is_available():
        found["cuda_both"] = round(measure_both(CUDA_GOAL_PAGE_BYTES, 128, args.rounds), 3)
    plan_us = round(plan_1000_us(), 1)
    if not args.json:
        print_table(cases)
        print(f"\nplanning 1,000 blocks: {plan_us} us\nratios: {found}")
        return
    print(
        json.dumps(
            {
                "ratios": found,
                "plan_1000_us": plan_us,
                "date": time.strftime("%Y-%m-%d"),
                "machine": {
                    "processor": platform.machine(),
                    "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                    "cuda": torch.version.cuda,
                    "torch": torch.__version__,
                    "numpy": np.__version__,
                },
                "cases": [case.to_json() for case in cases],
            }
        )
    )


if __name__ == "__main__":
    main()
