"""Which device a layout's tensors need. Each brings in only the parts of torch that it uses."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtier_core.transfer.device import Device
from kvtier_core.transfer.layout import KVLayout
from kvtier_core.transfer.pool import Pool

if TYPE_CHECKING:
    import torch

    from kvtier_core.transfer.streams import CopyBatch


def has_device(place: "torch.device") -> bool:
    """Whether ``open_device`` has one for tensors in this *place*: a CPU, or an accelerator with streams in torch."""
    import torch  # noqa: PLC0415 - a process that only reads the pool has none

    return place.type == "cpu" or hasattr(getattr(torch, place.type, None), "Stream")


def open_device(
    layout: KVLayout,
    pool: Pool,
    worker: int = 0,
    on_finished: Callable[[], None] | None = None,
    copy_batch: "CopyBatch | None" = None,
) -> Device:
    """The device for where the layout's tensors are: the CPU's, CUDA's, or that of any accelerator with streams.

    *worker* and *on_finished* are those of ``LaneDevice``, *copy_batch* is the engine's own call for many copies at
    once, which a CPU does without. Raises ``ValueError`` when the workers' parts and the proof
    do not fit a row, or the pool has no such worker.
    """
    if layout.device.type == "cpu":
        from kvtier_core.transfer.cpu import CPUDevice  # noqa: PLC0415 - torch, and only the parts of it that are needed

        return CPUDevice(layout, pool, worker, on_finished)
    if layout.device.type == "cuda":
        from kvtier_core.transfer.cuda import CUDADevice  # noqa: PLC0415

        return CUDADevice(layout, pool, worker, on_finished, copy_batch)
    from kvtier_core.transfer.streams import StreamDevice  # noqa: PLC0415

    return StreamDevice(layout, pool, worker, on_finished, copy_batch)
