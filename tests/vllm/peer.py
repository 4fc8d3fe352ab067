"""vLLM's own tiering on a CPU: its manager, its primary tier and its secondary tiers, with kvtier's CPU copies.

vLLM's specs refuse a CPU in ``get_worker`` alone. What replaces it copies between the device blocks and vLLM's shared
region with the same code that kvtier uses for its pool, so that a comparison is not about the copy.
"""

import mmap
from typing import Any

import numpy as np
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier_core.transfer import ControlPage, CPUDevice, PoolGeometry
from kvtier_vllm.facts import GroupFacts
from kvtier_vllm.parts import Part
from kvtier_vllm.worker import KvtierWorker


class CPUTieringSpec(TieringOffloadingSpec):
    peer: Any = None

    def get_worker(self, kv_caches):
        if self.peer is None:
            rank, workers = self.config.parallel.rank, self.config.parallel.world_size
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            pool: Any = RegionAsPool(region, workers)
            part = Part(list(like_the_others(kv_caches, workers)), self.blocks_per_chunk, rank)
            device = CPUDevice(part.make_layout(kv_caches), pool, worker=rank)
            self.peer = KvtierWorker(device, pool, part, 10.0)
        return self.peer


def like_the_others(kv_caches, workers):
    """The groups of an engine whose workers all have such caches."""
    for number, refs in enumerate(kv_caches.group_data_refs):
        size = sum(ref.page_size_bytes for ref in refs)
        yield GroupFacts(
            group_id=number, layers=("some",), kinds=("any",), tokens_per_block=1, parts=(size,) * workers
        )


class RegionAsPool:
    """What a device needs of a pool, on vLLM's region."""

    def __init__(self, region, workers):
        self._region = region
        rows = region.create_kv_memoryview()
        self.rows_array: Any = np.asarray(rows).view(np.uint8)
        # vLLM's rows carry no proof, for which a device wants to see room behind what it writes.
        self.geometry = PoolGeometry(
            num_rows=rows.shape[0], row_bytes=rows.shape[1] + 4096, num_workers=workers
        )
        self.control = ControlPage(memoryview(mmap.mmap(-1, mmap.PAGESIZE)), workers)

    def close(self):
        self.rows_array = None
        self._region.cleanup()
        return True
