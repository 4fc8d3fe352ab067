"""The CUDA device: ``streams`` over pinned rows, with the driver's own call for many copies (C40, C42).

Written against the interfaces of torch and of the driver, and never run on a GPU yet: docs/benchmarks/transfer.md says
what was tested how.

The engine's stream waits for no copy. Results come when the copies are over, so that compute that reads loaded blocks
may be queued then. Where rows can't be pinned, CUDA may hold up the caller of ``submit`` until a store is over.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from operator import add

import torch

from kvtier_core.transfer.layout import KVLayout
from kvtier_core.transfer.pinning import PinnedRows
from kvtier_core.transfer.plan import Numbers
from kvtier_core.transfer.pool import Pool
from kvtier_core.transfer.streams import CopyBatch, StreamDevice


class CUDADevice(StreamDevice):
    """Implements ``Device`` for tensors on a CUDA GPU. See ``StreamDevice``."""

    def __init__(
        self,
        layout: KVLayout,
        pool: Pool,
        worker: int = 0,
        on_finished: Callable[[], None] | None = None,
        copy_batch: CopyBatch | None = None,
    ) -> None:
        """Raises ``ValueError``: tensors not on a CUDA device, or what ``LaneDevice`` refuses.

        Where the rows can't be pinned a warning says why, and copies are slower.
        """
        if layout.device.type != "cuda":
            raise ValueError(f"the CUDA device needs tensors on a CUDA GPU, not on {layout.device}")
        begins = [layout.row_offset(group, worker) for group in range(len(layout.groups))]
        own = min(begins), max(map(add, begins, layout.payload_bytes))
        enter_thread = partial(torch.cuda.set_device, layout.device)
        self._pinned = PinnedRows(pool, own, torch.cuda.cudart(), enter_thread)  # type: ignore[no-untyped-call]
        try:
            super().__init__(layout, pool, worker, on_finished, copy_batch or find_driver_batch())
        except BaseException:
            self._pinned.release()
            raise

    def _event(self) -> torch.cuda.Event:
        # blocking: a thread that waits sleeps instead of spinning
        return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]

    def _host_memory(self, count: int) -> torch.Tensor:
        # A copy from memory that is not pinned is waited for by the host.
        return super()._host_memory(count).pin_memory()

    def _let_go(self) -> None:
        super()._let_go()
        self._pinned.release()


class _Attributes(ctypes.Structure):
    """The driver's ``CUmemcpyAttributes``."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = _Attributes(source_order=1)
"""Any other order would let a store read pages before the compute that writes them."""


def find_driver_batch() -> CopyBatch | None:
    """``cuMemcpyBatchAsync`` as of CUDA 12.8, which later drivers keep; ``None`` with an older driver or ROCm."""
    try:
        call = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
    except (OSError, AttributeError):
        return None

    def copy_batch(sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        order = (ctypes.byref(_IN_STREAM_ORDER), ctypes.byref(first), ctypes.c_size_t(1))
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (targets, sources, sizes)]
        error = call(*pointers, ctypes.c_size_t(len(sizes)), *order, ctypes.byref(failed), stream)
        if error != 0:
            raise RuntimeError(
                f"cuMemcpyBatchAsync: error {error} at copy {failed.value} of {len(sizes)}, of "
                f"{sizes.sum()} bytes in all"
            )

    return copy_batch
