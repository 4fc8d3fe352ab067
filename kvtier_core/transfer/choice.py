"""Which device a layout's tensors need. Each brings in only the parts of torch that it uses."""

from collections.abc import Callable

from kvtier_core.transfer.device import Device
from kvtier_core.transfer.layout import KVLayout
from kvtier_core.transfer.pool import Pool


def open_device(
    layout: KVLayout,
    pool: Pool,
    worker: int = 0,
    on_finished: Callable[[], None] | None = None,
) -> Device:
    """The device for where the layout's tensors are: the CPU's, CUDA's, or plain torch for other accelerators.

    *worker* and *on_finished* are those of ``LaneDevice``. Raises ``ValueError`` when the workers' parts and the proof
    do not fit a row, or the pool has no such worker.
    """
    if layout.device.type == "cpu":
        from kvtier_core.transfer.cpu import CPUDevice  # noqa: PLC0415 - torch, and only the parts of it that are needed

        return CPUDevice(layout, pool, worker, on_finished)
    if layout.device.type == "cuda":
        from kvtier_core.transfer.cuda import CUDADevice  # noqa: PLC0415

        return CUDADevice(layout, pool, worker, on_finished)
    from kvtier_core.transfer.staged import StagedDevice  # noqa: PLC0415

    return StagedDevice(layout, pool, worker, on_finished)
