"""Which device moves a layout's blocks: decided by where its tensors are, and by nothing else."""

from collections.abc import Callable

from kvtier_core.transfer.device import Device
from kvtier_core.transfer.layout import KVLayout
from kvtier_core.transfer.pool import Pool


def open_device(
    layout: KVLayout,
    pool: Pool,
    worker: int = 0,
    on_finished: Callable[[], None] | None = None,
    *,
    copy_threads: int = 2,
) -> Device:
    """The fastest device there is for this layout: the CPU's, CUDA's, or plain torch for other accelerators.

    *worker* and *on_finished* are those of ``LaneDevice``, *copy_threads* those of ``CPUDevice``. Raises ``ValueError``
    when the workers' parts and the proof do not fit a row, or the pool has no such worker.
    """
    if layout.device.type == "cpu":
        from kvtier_core.transfer.cpu import CPUDevice  # noqa: PLC0415 - torch, and only the parts of it that are needed

        return CPUDevice(layout, pool, pool.control, worker, on_finished, copy_threads)
    if layout.device.type == "cuda":
        from kvtier_core.transfer.cuda import CUDADevice  # noqa: PLC0415

        return CUDADevice(layout, pool, pool.control, worker, on_finished)
    from kvtier_core.transfer.staged import StagedDevice  # noqa: PLC0415

    return StagedDevice(layout, pool, pool.control, worker, on_finished)
