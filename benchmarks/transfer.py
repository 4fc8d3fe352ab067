"""Measures device transfers beside the limit and beside what a user would write, in one run.

``python benchmarks/transfer.py --json``; it needs torch and numpy only. Every round draws new block ids and rows,
so that nothing is warm that would not be in an engine, and runs all contestants in a random order:

- *limit*: one memcpy (on a GPU: one asynchronous copy to or from pinned memory) of as many bytes in one piece;
- *kvtier*: the device, from submit to the end of the wait, planning and threads included;
- *loop*: ``copy_`` a page;
- *index*: ``index_select`` or ``index_copy_`` a layer.

Times are the best of all rounds: other programs on the machine only ever add to them. A case's ratio is the limit's
time by kvtier's; a reported ratio is the median over the cases of at least ``RATIO_BYTES``.
"""

import argparse
import gc
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

from kvtier_core.transfer import Device, Direction, GroupTransfer, KVLayout, Pool, PoolGeometry
from kvtier_core.transfer.cpu import CPUDevice
from kvtier_core.transfer.plan import TransferLimits, plan_transfer

LAYERS = 32
PAGE_BYTES = [2 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20]
BLOCKS = [1, 16, 128, 512, 1024]
MAX_BYTES = 128 << 20
"""Of one transfer."""
RATIO_BYTES = 8 << 20
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

    def __init__(self, layout: str, page_bytes: int, blocks: int) -> None:
        self.block_bytes = LAYERS * page_bytes
        self.num_blocks = max(MEMORY_FACTOR * blocks, 8)
        shape = (self.num_blocks, page_bytes)
        if layout == "block_major":
            whole = torch.ones(self.num_blocks, LAYERS * page_bytes, dtype=torch.uint8)
            self.tensors = [whole]
        else:
            self.tensors = [torch.ones(shape, dtype=torch.uint8) for _ in range(LAYERS)]
        self.plain = torch.ones(self.num_blocks * self.block_bytes, dtype=torch.uint8).numpy()
        row_bytes = self.block_bytes + 4096  # the proof, and padding to a page
        self.pool = Pool.create(PoolGeometry(num_rows=self.num_blocks, row_bytes=row_bytes))
        self.pool.rows_array[:] = 1
        self.rows = torch.from_numpy(self.pool.rows_array)
        self.device: Device = CPUDevice(KVLayout(self.tensors), self.pool, self.pool.control)
        self._job = 0
        self._offset = 0

    def close(self) -> None:
        """Give everything back."""
        self.device.shutdown(TIMEOUT_S)
        del self.rows
        gc.collect()
        assert self.pool.close()

    def limit(self, direction: Direction, blocks: Sequence[int], _rows: Sequence[int]) -> None:
        """One memcpy, of another stretch each time."""
        size = len(blocks) * self.block_bytes
        pool = self.pool.rows_array.reshape(-1)
        self._offset = (self._offset + size) % (len(self.plain) - size + 1) // 64 * 64
        a, b = pool[self._offset : self._offset + size], self.plain[self._offset : self._offset + size]
        np.copyto(*((a, b) if direction is Direction.STORE else (b, a)))

    def kvtier(self, direction: Direction, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """The device under test."""
        self._job += 1
        parts = [GroupTransfer(block_ids=blocks, rows=rows)]
        if direction is Direction.STORE:
            self.device.submit_store(self._job, parts, 0)
        else:
            self.device.submit_load(self._job, parts, 0)
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

    def index(self, direction: Direction, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """An ``index_select`` a layer, and one more to get the bytes to their places."""
        block_ids, row_ids = torch.tensor(blocks), torch.tensor(rows)
        offset = 0
        for tensor in self.tensors:
            places = self.rows[:, offset : offset + tensor.shape[1]]
            if direction is Direction.STORE:
                places.index_copy_(0, row_ids, tensor.index_select(0, block_ids))
            else:
                tensor.index_copy_(0, block_ids, places.index_select(0, row_ids))
            offset += tensor.shape[1]


def measure(layout: str, page_bytes: int, blocks: int, rounds: int) -> Iterator[Case]:
    """Both directions of one geometry."""
    memory = Memory(layout, page_bytes, blocks)
    contestants: list[Callable[..., None]] = [memory.limit, memory.kvtier, memory.loop, memory.index]
    chance = random.Random(0)
    try:
        for direction in Direction:
            case = Case("cpu", layout, page_bytes, blocks, direction)
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
    """The figures that have goals."""
    found = {}
    for direction in Direction:
        large = [case for case in cases if case.direction is direction and case.bytes >= RATIO_BYTES]
        for name, chosen in (
            ("block_major", [case for case in large if case.layout == "block_major"]),
            *(
                (
                    f"layer_major_{page >> 10}KiB",
                    [c for c in large if (c.layout, c.page_bytes) == ("layer_major", page)],
                )
                for page in PAGE_BYTES
            ),
        ):
            if chosen:
                median = statistics.median(case.ratio for case in chosen)
                found[f"cpu_{name}_{direction.value}"] = round(median, 3)
    return found


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
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in an engine's worker; two threads on busy cores wait for each other
    cases: list[Case] = []
    for page_bytes in PAGE_BYTES:
        for blocks in BLOCKS:
            if blocks * LAYERS * page_bytes <= MAX_BYTES:
                for layout in ("block_major", "layer_major"):
                    cases += measure(layout, page_bytes, blocks, args.rounds)
    plan_us = round(plan_1000_us(), 1)
    if not args.json:
        print_table(cases)
        print(f"\nplanning 1,000 blocks: {plan_us} us\nratios: {ratios(cases)}")
        return
    print(
        json.dumps(
            {
                "ratios": ratios(cases),
                "plan_1000_us": plan_us,
                "machine": {
                    "processor": platform.machine(),
                    "torch": torch.__version__,
                    "numpy": np.__version__,
                },
                "cases": [case.to_json() for case in cases],
            }
        )
    )


if __name__ == "__main__":
    main()
