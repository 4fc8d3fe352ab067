"""A random engine on the simulated GPU: it stores and loads through the CUDA device, and checks every byte.

One seed is one run, but for the moments at which streams and threads get their turns. The engine writes blocks right
before it stores them, and again right after. It writes blocks right before they are loaded, reads them right after, and
gives the rows other bytes. What must be where is kept in copies that follow the order of the engine's calls.
"""

import random
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from kvtier_core.transfer import (
    CUDADevice,
    Device,
    Direction,
    GroupTransfer,
    KVGroup,
    KVLayout,
    Pool,
    PoolGeometry,
    streams,
)
from tests.transfer.conftest import TIMEOUT_S
from tests.transfer.kv import payload, places, row_bytes, said_to_be_on_a_gpu, spread
from tests.transfer.round_trip import Chance
from tests.transfer.simgpu.gpu import GPU

JOBS = 20
"""Of one run."""
OUTCOMES = frozenset(
    {
        "a store",
        "a load",
        "both directions at once",
        "several groups in a job",
        "pages that are gathered",
        "pages that are copied straight",
        "pages that are apart in a slot",
        "more than fit the staging buffer",
        "copies by the driver's batch",
        "copies by torch",
        "a part that begins within a row",
        "a reset with jobs under way",
        "a shutdown that lets a job end",
    }
)
_ROWS = 12
_PAGES = (8, 24, 64, 13, 100)
_ROOM = 32  # after each page of a tensor, bytes that stay as they are
_UNDER_WAY = 6


class _Job:
    """A transfer under way: ``(row, slot)`` to ``(group, block)``, and to the bytes that it must move."""

    def __init__(self, direction: Direction, moves: dict[tuple[int, int], tuple[int, int]]) -> None:
        self.direction = direction
        self.moves = moves
        self.content: dict[tuple[int, int], bytes] = {}
        self.rows = {row for row, _ in moves}
        self.blocks = set(moves.values())


class Run:
    """The stores and loads of one seed. ``wrong`` says what was found amiss, ``seen`` which outcomes there were."""

    def __init__(self, seed: int) -> None:
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._chance = Chance(f"parts {seed}", self._random.randint(1, 3))
        memory = self._memory()
        self._kv = [[pages for _, pages in tensors] for tensors in memory]
        self._all_kv = [whole for tensors in memory for whole, _ in tensors]
        self._kv_must_be = [whole.clone() for whole in self._all_kv]
        views = iter(self._kv_must_be)
        self._must_be = [[next(views)[:, : pages.shape[1]] for pages in tensors] for tensors in self._kv]
        groups = [spread(kv, self._random) if self._random.random() < 0.3 else KVGroup(kv) for kv in self._kv]
        self._layout = said_to_be_on_a_gpu(KVLayout(*groups, block_size_factor=self._chance.factor))
        num_workers = self._random.randint(1, 2)
        self._worker = self._random.randrange(num_workers)
        self._limits: dict[str, Any] = {
            "_GATHER_BELOW": self._random.choice((0, *_PAGES)),
            "_STAGING_BYTES": self._random.randint(1, 3 * max(self._layout.payload_bytes)),
            "_IDS": self._random.randint(1, 12),
            "_COPIES_A_CALL": self._random.randint(1, 20),
        }
        self._pool = Pool.create(
            PoolGeometry(
                num_rows=_ROWS, row_bytes=row_bytes(self._layout, num_workers), num_workers=num_workers
            )
        )
        self._pool.rows_array[:] = 9
        self._rows_must_be = self._pool.rows_array.copy()
        self._gpu = GPU(seed)
        self._under_way: dict[tuple[Direction, int], _Job] = {}
        self._last_ended = dict.fromkeys(Direction, 0)

    def _memory(self) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """For each group its tensors: the whole memory of each, and the pages in it."""
        groups = []
        for _ in range(self._random.randint(1, 3)):
            num_blocks = self._random.randint(6, 14)
            pages = self._random.choices(_PAGES, k=self._random.randint(1, 3))
            wholes = [torch.full((num_blocks, page + _ROOM), 7, dtype=torch.uint8) for page in pages]
            groups.append([(whole, whole[:, :page]) for whole, page in zip(wholes, pages, strict=True)])
        return groups

    def run(self) -> "Run":
        """Once."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - however a deliberate mistake shows, it has been seen
            self.wrong.append(f"{type(error).__name__}: {error}")
        self._under_way.clear()
        self.wrong += self._gpu.faults
        if not self._pool.close():
            self.wrong.append("something still holds the pool's rows")
        return self

    def _run(self) -> None:
        copy_batch = self._random.choice((None, self._gpu.copy_batch))
        self.seen["copies by torch" if copy_batch is None else "copies by the driver's batch"] += 1
        with self._gpu.installed(), patch.multiple(streams, **self._limits):
            device = CUDADevice(self._layout, self._pool, self._worker, copy_batch=copy_batch)
            try:
                self._serve(device)
            finally:
                assert device.shutdown(TIMEOUT_S)
            before = len(self._under_way)
            self._collect(device, is_shut_down=True)
            assert not self._under_way, f"{len(self._under_way)} of {before} jobs got no result"
        if (self._pool.rows_array != self._rows_must_be).any():
            self.wrong.append("rows hold other bytes at the end")
        if not all(map(torch.equal, self._all_kv, self._kv_must_be)):
            self.wrong.append("device memory holds other bytes at the end")

    def _serve(self, device: Device) -> None:
        job_id = 0
        while job_id < JOBS:
            kind = self._random.random()
            if kind < 0.6 and len(self._under_way) < _UNDER_WAY:
                job_id += 1
                self._submit(device, self._random.choice(list(Direction)), job_id)
            elif kind < 0.8 and self._under_way:
                direction, waited = self._random.choice(list(self._under_way))
                assert device.wait(direction, [waited], TIMEOUT_S)
                self._collect(device)
            elif kind < 0.84 and self._under_way:
                self._reset()
            elif kind < 0.9 and self._under_way:
                self._collect_next(device)
            else:
                self._collect(device)

    def _submit(self, device: Device, direction: Direction, job_id: int) -> None:
        """A transfer between blocks and rows that no other one under way touches, if enough are left."""
        parts = self._parts()
        job = _Job(direction, self._chance.moves(parts))
        for at, (group, block) in job.moves.items():
            self._compute_writes(group, block)
            if direction is Direction.STORE:
                job.content[at] = payload(self._must_be[group], block)
            else:
                job.content[at] = self._rows_must_be[self._place(*at, group)].tobytes()
        self._see(job, parts)
        self._under_way[direction, job_id] = job
        device.submit(direction, job_id, parts)

    def _parts(self) -> list[GroupTransfer]:
        taken_rows = set().union(*(job.rows for job in self._under_way.values()))
        taken = set().union(*(job.blocks for job in self._under_way.values()))
        rows = [row for row in range(_ROWS) if row not in taken_rows]
        rows = self._random.sample(rows, min(len(rows), 6))
        blocks_of = {}
        for group in self._random.sample(range(len(self._kv)), min(len(self._kv), len(rows))):
            blocks = range(self._layout.groups[group].num_blocks)
            if free := [block for block in blocks if (group, block) not in taken]:
                blocks_of[group] = free
        return self._chance.parts(rows, blocks_of) if blocks_of else []

    def _collect(self, device: Device, *, is_shut_down: bool = False) -> None:
        for result in device.get_finished():
            job = self._under_way.pop((result.direction, result.job_id))
            if result.job_id <= self._last_ended[result.direction]:
                self.wrong.append(f"{result.direction.value} job {result.job_id} ended after a later one")
            self._last_ended[result.direction] = result.job_id
            self.seen["a shutdown that lets a job end"] += is_shut_down
            if result.ok:
                self._check(job)
            else:
                self.wrong.append(f"a {result.direction.value} failed: {result}")

    def _collect_next(self, device: Device) -> None:
        """Ask for results until there is one, beside the lanes that wait for the same events."""
        before, deadline = len(self._under_way), time.monotonic() + TIMEOUT_S
        while len(self._under_way) == before:
            assert time.monotonic() < deadline, "no job ended"
            self._collect(device)

    def _reset(self) -> None:
        """Wait as an engine in a reset, which asks for no results (C36.3): no row is in use afterwards."""
        assert self._pool.wait_for_copies(TIMEOUT_S)
        self.seen["a reset with jobs under way"] += 1
        for job in self._under_way.values():
            if job.direction is Direction.STORE and not self._is_stored(job):
                self.wrong.append("a row was said to be free before its bytes were there")

    def _is_stored(self, job: _Job) -> bool:
        return all(
            self._pool.rows_array[self._place(row, slot, group)].tobytes() == job.content[row, slot]
            for (row, slot), (group, _) in job.moves.items()
        )

    def _check(self, job: _Job) -> None:
        """Look at once at what was stored; let the next kernel look at what was loaded."""
        for (row, slot), (group, block) in job.moves.items():
            content = job.content[row, slot]
            place = self._place(row, slot, group)
            if job.direction is Direction.STORE:
                if self._pool.rows_array[place].tobytes() != content:
                    self.wrong.append(f"block {block} of group {group} is not in slot {slot} of row {row}")
                self._rows_must_be[place] = list(content)
                self._compute_writes(group, block)
            else:
                self._gpu.compute.launch(partial(self._compute_reads, group, block, content))
                _write(self._must_be[group], block, content)
                other = list(self._random.randbytes(len(content)))
                self._pool.rows_array[place] = self._rows_must_be[place] = other

    def _compute_writes(self, group: int, block: int) -> None:
        content = self._random.randbytes(self._layout.groups[group].block_bytes)
        self._gpu.compute.launch(partial(_write, self._kv[group], block, content))
        _write(self._must_be[group], block, content)

    def _compute_reads(self, group: int, block: int, content: bytes) -> None:
        if payload(self._kv[group], block) != content:
            self.wrong.append(
                f"compute read other bytes than were loaded into block {block} of group {group}"
            )

    def _place(self, row: int, slot: int, group: int) -> tuple[int, npt.NDArray[np.int64]]:
        return row, places(self._layout, group, self._worker, slot)

    def _see(self, job: _Job, parts: list[GroupTransfer]) -> None:
        self.seen[f"a {job.direction.value}"] += bool(parts)
        self.seen["both directions at once"] += any(
            other.direction is not job.direction for other in self._under_way.values()
        )
        self.seen["several groups in a job"] += len(parts) > 1
        for part in parts:
            group = self._layout.groups[part.group]
            is_apart = len(group.pieces) > 1
            is_small = max(group.page_bytes) < self._limits["_GATHER_BELOW"]
            is_gathered = len(group.tensors) > 1 and is_small and not is_apart
            self.seen["pages that are apart in a slot"] += is_apart
            self.seen[f"pages that are {'gathered' if is_gathered else 'copied straight'}"] += 1
            room = max(self._limits["_STAGING_BYTES"], *self._layout.payload_bytes)
            self.seen["more than fit the staging buffer"] += (
                is_gathered and len(part.block_ids) * group.block_bytes > room
            )
            self.seen["a part that begins within a row"] += part.first_slot > 0


def _write(tensors: list[torch.Tensor], block: int, content: bytes) -> None:
    for tensor in tensors:
        page, content = content[: tensor.shape[1]], content[tensor.shape[1] :]
        tensor[block] = torch.tensor(list(page), dtype=torch.uint8)


@dataclass(frozen=True)
class Findings:
    """What many runs found."""

    jobs: int
    wrong: list[str]
    unseen_outcomes: list[str]


def run_jobs(first_seed: int, jobs: int) -> Findings:
    """As many runs as *jobs* needs."""
    wrong: list[str] = []
    seen: Counter[str] = Counter()
    seeds = range(first_seed, first_seed + -(-jobs // JOBS))
    for seed in seeds:
        run = Run(seed).run()
        wrong += [f"seed {seed}: {what}" for what in run.wrong]
        seen += run.seen
    return Findings(len(seeds) * JOBS, wrong, sorted(OUTCOMES - set(seen)))
