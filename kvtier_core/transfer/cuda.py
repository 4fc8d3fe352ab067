"""The CUDA device: ``staged`` copies on streams of their own, over pinned rows (C40, C42).

Written against torch's interface and never run on a GPU yet: docs/benchmarks/transfer.md says what was tested how.

Copies start when the compute queued at their submission has ended. For a store a lane's thread sleeps until then; for a
load the load stream waits, and no thread. The engine's stream waits for neither. Results come when the copies are over,
so that compute that reads loaded blocks may be queued then.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.layout import KVLayout
from kvtier_core.transfer.pool import Pool
from kvtier_core.transfer.staged import StagedDevice

_PIN_BYTES = 1 << 30
"""Pinned by one call: a call for hundreds of GiB holds the driver for minutes."""

_log = logging.getLogger("kvtier.transfer")


class CUDADevice(StagedDevice):
    """Implements ``Device`` for tensors on a CUDA GPU. See ``StagedDevice``."""

    _queues = True

    def __init__(
        self,
        layout: KVLayout,
        pool: Pool,
        worker: int = 0,
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        """Raises ``ValueError``: tensors not on a CUDA device, or what ``LaneDevice`` refuses.

        Where the rows can't be pinned a warning says why, and copies are slower.
        """
        if layout.device.type != "cuda":
            raise ValueError(f"the CUDA device needs tensors on a CUDA GPU, not on {layout.device}")
        self._streams = {direction: _stream(layout.device) for direction in Direction}
        self._copied = {direction: _event() for direction in Direction}
        self._pinned = PinnedRows(pool, layout.device)
        try:
            super().__init__(layout, pool, worker, on_finished)
        except BaseException:
            self._pinned.release()
            raise

    def _enter_lane(self) -> None:
        # Else each use of a stream ends with a step back to GPU 0, which makes a context there: some hundred MiB.
        torch.cuda.set_device(self._layout.device)

    def _mark_compute(self, direction: Direction) -> Callable[[], object]:
        event = _event()
        event.record(torch.cuda.current_stream(self._layout.device))
        if direction is Direction.STORE:
            return event.synchronize
        # The load stream waits, before what the lane queues there next; the lane does not.
        return partial(self._streams[direction].wait_event, event)

    def _on(self, direction: Direction) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = torch.cuda.stream(self._streams[direction])
        return stream

    def _to_device(self, numbers: torch.Tensor) -> torch.Tensor:
        # From pinned memory: a copy from any other is waited for by the host.
        return numbers.pin_memory().to(self._device, non_blocking=True)

    def _settle(self, direction: Direction) -> None:
        event = self._copied[direction]
        event.record(self._streams[direction])
        event.synchronize()

    def _let_go(self) -> None:
        super()._let_go()
        self._pinned.release()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    # blocking: a thread that waits sleeps instead of spinning
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


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
