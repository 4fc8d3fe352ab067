"""An offloading spec like kvtier's, on a device that is bad as ``BAD_DEVICE`` says.

``lies``: it loads one wrong byte. ``fails``: no store succeeds. ``store`` or ``load``: every copy of the last worker
that way fails after its self-test.
"""

import os
from unittest.mock import patch

from kvtier_core.transfer import CPUDevice, Direction
from kvtier_vllm import spec


class _Bad(CPUDevice):
    is_tested = False

    def _copy(self, direction, plan):
        kind = os.environ["BAD_DEVICE"]
        is_last = self._worker == self._control.num_workers - 1
        fails = kind == "fails" and direction is Direction.STORE
        if fails or (self.is_tested and is_last and kind == direction.value):
            raise OSError("the bus is on fire")
        super()._copy(direction, plan)
        if kind == "lies" and direction is Direction.LOAD:
            for group, runs in plan.items():
                for block in runs[0].tolist():
                    self._layout.groups[group].tensors[1][block, 3] ^= 1


class KvtierSpec(spec.KvtierSpec):
    """The same, on a bad device."""

    def _make_worker(self, kv_caches):
        def open_device(layout, pool, worker, copy_batch):
            return _Bad(layout, pool, worker)

        with patch.object(spec, "open_device", open_device):
            worker = super()._make_worker(kv_caches)
        worker._device.is_tested = True
        return worker
