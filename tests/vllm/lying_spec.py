"""An offloading spec like kvtier's, on a device that loads one wrong byte."""

from unittest.mock import patch

from kvtier_core.transfer import CPUDevice, Direction
from kvtier_vllm import spec


class _Liar(CPUDevice):
    def _copy(self, direction, plan):
        super()._copy(direction, plan)
        if direction is Direction.LOAD:
            for group, runs in plan.items():
                for block in runs[0].tolist():
                    self._layout.groups[group].tensors[1][block, 3] ^= 1


class KvtierSpec(spec.KvtierSpec):
    """The same, on a liar."""

    def _make_worker(self, kv_caches):
        with patch.object(spec, "open_device", _Liar):
            return super()._make_worker(kv_caches)
