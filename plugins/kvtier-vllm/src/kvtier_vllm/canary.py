"""The self-test's way through a worker: each of its transfers is one that vLLM could have asked for.

A checksum of stored bytes can't see a worker that loads K for V in a layer, or one head for another. The self-test
compares what the device's blocks held with what comes back. It sees such a worker if its transfers go through it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.base import TransferResult as OffloadedResult

from kvtier_core.transfer import Device, Direction, GroupTransfer, Pool, TransferResult
from kvtier_vllm.facts import GroupFacts
from kvtier_vllm.parts import Part
from kvtier_vllm.worker import KvtierWorker, PoolRows


class WorkerAsDevice:
    """A ``Device`` for ``self_test``: a worker of its own on *device*, which nobody else uses meanwhile."""

    def __init__(
        self, device: Device, pool: Pool, groups: Sequence[GroupFacts], blocks_per_chunk: int, rank: int
    ) -> None:
        # The test has rows of its own for each worker, and looks at all of them.
        part = Part([replace(group, copies=1) for group in groups], blocks_per_chunk, rank)
        self._device = device
        self._indices = part.indices
        self._num_groups = len(groups)
        self._worker = KvtierWorker(device, pool, part, 0.0)
        self._jobs: dict[int, tuple[Direction, int]] = {}
        """By vLLM's job ids, which grow over both directions."""

    def submit(self, direction: Direction, job_id: int, parts: Sequence[GroupTransfer]) -> None:
        """As vLLM does: one list of blocks, group after group, and one of rows."""
        parts = sorted(parts, key=lambda part: part.group)
        sizes, firsts = [0] * self._num_groups, [0] * self._num_groups
        for part in parts:
            sizes[self._indices[part.group]] = len(part.block_ids)
            firsts[self._indices[part.group]] = part.first_slot
        blocks = GPULoadStoreSpec([int(block) for part in parts for block in part.block_ids], sizes, firsts)
        rows = PoolRows([int(row) for part in parts for row in part.rows])
        number = len(self._jobs)
        self._jobs[number] = direction, job_id
        if direction is Direction.STORE:
            self._worker.submit_store(number, blocks, rows)
        else:
            self._worker.submit_load(number, rows, blocks)

    def get_finished(self) -> list[TransferResult]:
        """What the worker tells vLLM, and why a copy failed: of a store vLLM is told only that it is over."""
        return [self._as_devices(result) for result in self._worker.get_finished()]

    def _as_devices(self, result: OffloadedResult) -> TransferResult:
        direction, job_id = self._jobs[result.job_id]
        why = self._worker.failures.get(direction)
        return TransferResult(
            direction=direction,
            job_id=job_id,
            ok=why is None and result.success,
            bytes=result.transfer_size or 0,
            seconds=result.transfer_time or 0.0,
            error=why,
        )

    def wait(self, direction: Direction, job_ids: Iterable[int], timeout_s: float) -> bool:
        """The device's, which ends: vLLM's waits for as long as it takes."""
        return self._device.wait(direction, job_ids, timeout_s)

    def shutdown(self, timeout_s: float) -> bool:
        """The device's."""
        return self._device.shutdown(timeout_s)
