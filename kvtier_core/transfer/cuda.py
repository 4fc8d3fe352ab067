"""The CUDA device: ``streams`` over pinned rows, with the driver's own call for many copies (C40, C42).

Written against the interfaces of torch and of the driver, and never run on a GPU yet: docs/benchmarks/transfer.md says
what was tested how.

The engine's stream waits for no copy. Results come when the copies are over, so that compute that reads loaded blocks
may be queued then. Where rows can't be pinned, CUDA may hold up the caller of ``submit`` until a store is over.
"""

import ctypes
import logging
import threading
from collections.abc import Callable

import torch

from kvtier_core.transfer.layout import KVLayout
from kvtier_core.transfer.plan import Numbers
from kvtier_core.transfer.pool import Pool
from kvtier_core.transfer.streams import CopyBatch, StreamDevice

_PIN_BYTES = 1 << 30
"""Pinned by one call: a call for hundreds of GiB holds the driver for minutes."""

_log = logging.getLogger("kvtier.transfer")


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
        self._pinned = PinnedRows(pool, layout.device)
        try:
            super().__init__(layout, pool, worker, on_finished, copy_batch or find_driver_batch())
        except BaseException:
            self._pinned.release()
            raise

    def _event(self) -> torch.cuda.Event:
        # blocking: a thread that waits sleeps instead of spinning
        return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]

    def _to_device(self, numbers: torch.Tensor) -> torch.Tensor:
        # From pinned memory: a copy from any other is waited for by the host.
        return numbers.pin_memory().to(self._device, non_blocking=True)

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


class PinnedRows:
    """The pool's rows, registered with CUDA so that copies are asynchronous and fast. All rows or none."""

    def __init__(self, pool: Pool, device: torch.device) -> None:
        """Register them, or log why not."""
        self._addresses: list[int] = []
        self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # CUDA remembers a refusal for the thread it happened on, and torch would take it for its next kernel's.
        pinning = threading.Thread(target=self._pin, args=(pool, device), name="kvtier-pin")
        pinning.start()
        pinning.join()

    def release(self) -> None:
        """Unregister what was registered, before the pool's mapping goes. Twice is fine."""
        while self._addresses:
            self._cudart.cudaHostUnregister(self._addresses.pop())

    def _pin(self, pool: Pool, device: torch.device) -> None:
        try:
            refusal = self._register(pool, device)
        except BaseException as error:  # noqa: BLE001 - the device works without, and nobody sees this thread's errors
            refusal = f"{type(error).__name__}: {error}"
        if refusal is not None:
            self.release()
            _log.warning(
                "CUDA refused to pin the pool (%s): copies will be slower. Raise the limit on locked memory "
                "(ulimit -l) or make the pool smaller",
                refusal,
            )

    def _register(self, pool: Pool, device: torch.device) -> str | None:
        """What CUDA has against it, if anything; the rows registered until then stay so."""
        # Whole rows at a time: one copy must not span two registrations.
        geometry, address = pool.geometry, pool.address
        rows_a_call = max(1, _PIN_BYTES // geometry.row_bytes)
        with torch.cuda.device(device):
            for row in range(0, geometry.num_rows, rows_a_call):
                size = min(rows_a_call, geometry.num_rows - row) * geometry.row_bytes
                begin = address + row * geometry.row_bytes
                error = int(self._cudart.cudaHostRegister(begin, size, 0))
                if error != 0:
                    return f"cudaHostRegister: error {error} at row {row} of {geometry.num_rows}"
                self._addresses.append(begin)
        return None
