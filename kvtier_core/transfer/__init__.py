"""Device transfers and the pool they fill: the part of kvtier that runs where the model's KV is.

Imports only the standard library and numpy, and torch in the device modules, so that a worker on a bare GPU
machine needs nothing else of kvtier. Names load on first use: a process that only reads the pool never pays
for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_core.transfer.choice import has_device, open_device
    from kvtier_core.transfer.control import SCHEDULER, ControlPage
    from kvtier_core.transfer.cpu import CPUDevice
    from kvtier_core.transfer.cuda import CUDADevice
    from kvtier_core.transfer.device import Device, TransferResult
    from kvtier_core.transfer.direction import Direction
    from kvtier_core.transfer.layout import KVGroup, KVLayout
    from kvtier_core.transfer.numa import cpus_near
    from kvtier_core.transfer.plan import GroupTransfer, Numbers
    from kvtier_core.transfer.pool import Pool, PoolGeometry
    from kvtier_core.transfer.rounds import SELF_TEST_JOBS, SelfTestError
    from kvtier_core.transfer.selftest import SelfTestReport, self_test
    from kvtier_core.transfer.streams import StreamDevice

__all__ = [
    "SCHEDULER",
    "SELF_TEST_JOBS",
    "CPUDevice",
    "CUDADevice",
    "ControlPage",
    "Device",
    "Direction",
    "GroupTransfer",
    "KVGroup",
    "KVLayout",
    "Numbers",
    "Pool",
    "PoolGeometry",
    "SelfTestError",
    "SelfTestReport",
    "StreamDevice",
    "TransferResult",
    "cpus_near",
    "has_device",
    "open_device",
    "self_test",
]

_HOMES = {
    "SCHEDULER": "control",
    "SELF_TEST_JOBS": "rounds",
    "CPUDevice": "cpu",
    "CUDADevice": "cuda",
    "ControlPage": "control",
    "Device": "device",
    "Direction": "direction",
    "GroupTransfer": "plan",
    "KVGroup": "layout",
    "KVLayout": "layout",
    "Numbers": "plan",
    "Pool": "pool",
    "PoolGeometry": "pool",
    "SelfTestError": "rounds",
    "SelfTestReport": "selftest",
    "StreamDevice": "streams",
    "TransferResult": "device",
    "cpus_near": "numa",
    "has_device": "choice",
    "open_device": "choice",
    "self_test": "selftest",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the module protocol: whatever the name stands for
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
