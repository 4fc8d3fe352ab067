"""The worker side: vLLM's transfer jobs on kvtier's device copies.

Decides nothing about blocks: which rows a job is about comes from the scheduler. It numbers the jobs of each direction
in the order in which vLLM hands them over, so that the pool's control page counts them (see ``unfinished``).
"""

import logging
import time
from collections.abc import Sequence

import torch
from vllm._custom_ops import swap_blocks_batch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtier_core.transfer import Device, Direction, GroupTransfer, Numbers, Pool
from kvtier_vllm.idle import IDLE_WAIT_S
from kvtier_vllm.parts import Part

_log = logging.getLogger("kvtier.vllm")
_WARN_S = 30.0
_IDLE_S = 2e-3
"""A worker on a CPU that is asked again within so long has computed nothing in between: it then waits a moment for the
end of a load, so that the thread that copies gets to run."""


class PoolRows(BlockIDsLoadStoreSpec):
    """The pool's side of a transfer: its rows, in the order of the keys."""


def make_parts(blocks: GPULoadStoreSpec, rows: Sequence[int], blocks_per_chunk: int) -> list[GroupTransfer]:
    """What vLLM says of a transfer, group after group; the first row of each may be used from its middle on."""
    ids: list[int] = blocks.block_ids.tolist()
    parts = []
    block = row = 0
    for group, (size, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
        if not size:
            continue
        slot = first % blocks_per_chunk
        count = -(-(slot + size) // blocks_per_chunk)
        parts.append(
            GroupTransfer(
                block_ids=ids[block : block + size],
                rows=rows[row : row + count],
                group=group,
                first_slot=slot,
            )
        )
        block, row = block + size, row + count
    assert (block, row) == (len(ids), len(rows)), "vLLM and kvtier count blocks differently"
    return parts


def copy_batch(sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
    """A GPU's ``CopyBatch``: vLLM's own call, which takes the order of the stream unless told otherwise."""
    swap_blocks_batch(*map(torch.from_numpy, (sources, targets, sizes)))


class KvtierWorker(OffloadingWorker):
    """Implements vLLM's worker. All methods belong to the worker's own thread; only ``wait`` and ``shutdown`` wait."""

    def __init__(
        self,
        device: Device,
        pool: Pool,
        part: Part,
        shutdown_timeout_s: float,
        device_type: str = "cpu",
    ) -> None:
        self._device = device
        self._pool = pool
        self._rank = part.rank
        self._part = part
        self._device_type = device_type
        self._shutdown_timeout = shutdown_timeout_s
        self._last = {d: pool.control.get_last_announced(part.rank, d) for d in Direction}
        self._numbers: dict[int, tuple[Direction, int]] = {}
        self._jobs: dict[tuple[Direction, int], int] = {}
        self._asked_at = 0.0
        self.failures: dict[Direction, str] = {}
        """Why the first copy of a direction that failed did."""

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy device blocks to rows. Returns at once."""
        return self._submit(job_id, Direction.STORE, src_spec, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Copy rows to device blocks. Returns at once. vLLM 0.33 waits within the step for what is *expedited*."""
        del expedited  # loads go in order: those before it are over when it is
        return self._submit(job_id, Direction.LOAD, dst_spec, src_spec)

    def _submit(
        self, job_id: int, direction: Direction, blocks: GPULoadStoreSpec, rows: LoadStoreSpec
    ) -> bool:
        parts = self._part.choose(direction, make_parts(blocks, _rows(rows), self._part.blocks_per_chunk))
        self._last[direction] += 1
        number = self._last[direction]
        self._numbers[job_id] = direction, number
        self._jobs[direction, number] = job_id
        self._device.submit(direction, number, parts)
        return True

    def get_finished(self) -> list[TransferResult]:
        """The jobs that ended since the last call. Of a failed load vLLM stops the engine: no wrong KV.

        A failed store is over for vLLM like any other. The control page says to the scheduler what came of it, which
        then throws its rows away and ends offloading.
        """
        self._wait_if_idle()
        results = []
        for result in self._device.get_finished():
            job_id = self._jobs.pop((result.direction, result.job_id))
            del self._numbers[job_id]
            if not result.ok:
                self._tell_failure(result.direction, result.error or "it was dropped")
            results.append(
                TransferResult(
                    job_id=job_id,
                    success=result.ok or result.direction is Direction.STORE,
                    transfer_size=result.bytes,
                    transfer_time=result.seconds,
                )
            )
        return results

    def _tell_failure(self, direction: Direction, why: str) -> None:
        if direction is Direction.STORE:
            what = "nothing is offloaded or loaded any more, and the engine goes on without. Start it again to offload"
        else:
            what = "vLLM can't compute these blocks instead, and stops. Start it again"
        if not self.failures:
            _log.error(
                "worker %d: a device %s failed (%s): %s; if this comes again, run it without kvtier and report this "
                "line",
                self._rank,
                direction.value,
                why,
                what,
            )
        self.failures.setdefault(direction, why)
        self._pool.control.note_failure(self._rank)

    def _wait_if_idle(self) -> None:
        """Wait a moment for the oldest load, where vLLM does nothing but ask for it."""
        now, last = time.monotonic(), self._asked_at
        self._asked_at = now
        loads = [number for direction, number in self._jobs if direction is Direction.LOAD]
        if loads and self._device_type == "cpu" and now - last < _IDLE_S:
            self._device.wait(Direction.LOAD, [min(loads)], IDLE_WAIT_S)
            self._asked_at = time.monotonic()

    def wait(self, job_ids: set[int]) -> None:
        """Block until none of these jobs is under way: vLLM is about to reuse their device blocks."""
        wanted = [self._numbers[job_id] for job_id in job_ids if job_id in self._numbers]
        for direction in Direction:
            numbers = [number for where, number in wanted if where is direction]
            while not self._device.wait(direction, numbers, _WARN_S):
                _log.warning(
                    "device %s jobs %s have been running for %g s", direction.value, numbers, _WARN_S
                )

    def shutdown(self) -> None:
        """Stop copying and let go of the pool."""
        if self._device.shutdown(self._shutdown_timeout):
            self._pool.close()
        else:
            _log.warning("a device copy did not end in %g s: the pool stays mapped", self._shutdown_timeout)


def _rows(spec: LoadStoreSpec) -> list[int]:
    assert isinstance(spec, BlockIDsLoadStoreSpec), spec
    rows: list[int] = spec.block_ids.tolist()
    return rows
