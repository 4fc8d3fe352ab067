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
from kvtier_vllm.worker import KvtierWorker, make_layout


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
            device = CPUDevice(make_layout(kv_caches, self.blocks_per_chunk), pool, worker=rank)
            self.peer = KvtierWorker(device, pool, rank, self.blocks_per_chunk, 10.0)
        return self.peer


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
