"""A worker that loads the parts of the first layer's pages in another order, and an offloading spec that has it.

``PARTS`` says in how many equal parts a page is cut. The first two change places: 2 parts swap K and V; as many as K
and V have heads together swap two heads of K.
"""

import os
from unittest.mock import patch

from kvtier_vllm import canary, spec, worker


class Misreading(worker.KvtierWorker):
    """As after a change of vLLM's layout that its adapter does not know of."""

    def __init__(self, *args):
        super().__init__(*args)
        self._loads = {}

    def submit_load(self, job_id, src_spec, dst_spec, *args, **how):
        self._loads[job_id] = dst_spec.block_ids.tolist()
        return super().submit_load(job_id, src_spec, dst_spec, *args, **how)

    def get_finished(self):
        parts = int(os.environ["PARTS"])
        results = super().get_finished()
        for result in results:
            for block in self._loads.pop(result.job_id, ()):
                page = vars(self._device)["_layout"].groups[0].tensors[0][block].view(parts, -1)
                page.copy_(page[[1, 0, *range(2, parts)]])
        return results


class KvtierSpec(spec.KvtierSpec):
    """The same, with that worker."""

    def _make_worker(self, kv_caches):
        with (
            patch.object(canary, "KvtierWorker", Misreading),
            patch.object(spec, "KvtierWorker", Misreading),
        ):
            return super()._make_worker(kv_caches)
