"""The device's interface: how an engine's worker moves blocks between the device and the pool (C40, C41, C42).

One interface for CUDA and for the CPU standing in for it; the code behind it differs in the copy alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.plan import GroupTransfer


@dataclass(frozen=True, kw_only=True)
class TransferResult:
    """How one device transfer ended. ``ok`` means that every byte moved.

    ``dropped``: nothing was touched, because the job's epoch had passed or the device was shutting down. ``error`` says
    why a job failed; what it was to write is then undefined. ``bytes`` moved, in ``seconds`` of copying.
    """

    job_id: int
    direction: Direction
    ok: bool
    dropped: bool = False
    error: str | None = None
    bytes: int = 0
    seconds: float = 0.0


class Device(Protocol):
    """Moves device blocks. Transfers of one direction complete in order; the two directions run side by side.

    One transfer may hold several groups, and several parts of one group. Job ids grow within a direction, over the
    pool's whole life. *epoch* is the control page's when the job was made. The parts' ids are copied at submission.
    Between submit and result the caller keeps others from writing what a transfer reads and from touching what it
    writes. Waits take any time, ``math.inf`` too.
    """

    def submit_store(
        self,
        job_id: int,
        parts: Sequence[GroupTransfer],
        epoch: int,
        compute_done: Callable[[], object] | None = None,
    ) -> None:
        """Copy blocks to rows, after the compute that writes the blocks. Returns at once.

        *compute_done*, where given, blocks until that compute has ended (an event's ``wait``); it is called on a thread
        of the device. Where it is not, a device with streams follows all that the caller's current stream holds now.
        Raises ``ValueError`` when the job id does not grow, ``RuntimeError`` after ``shutdown``.
        """
        ...

    def submit_load(
        self,
        job_id: int,
        parts: Sequence[GroupTransfer],
        epoch: int,
        compute_done: Callable[[], object] | None = None,
        *,
        by_layer: bool = False,
    ) -> None:
        """Copy rows to blocks, wholly before the result is out. Returns at once; raises as the store.

        *compute_done* as with a store: compute queued before that still writes the blocks, such as the kernel that
        zeroes new ones. *by_layer* copies layer after layer, so that ``wait_layer`` need not wait for all of them; it
        costs more copies.
        """
        ...

    def get_finished(self) -> list[TransferResult]:
        """The results since the last call, each job's once. Never waits."""
        ...

    def wait(self, direction: Direction, job_ids: Iterable[int], timeout_s: float) -> bool:
        """Block until none of these jobs is running or queued; False when that took too long.

        For preemption and block reuse. Jobs that have ended, collected or not, count as ended. Not to be called from
        ``on_finished``.
        """
        ...

    def wait_layer(self, job_id: int, layer: int, timeout_s: float) -> bool:
        """Block until this load's bytes of all layers up to *layer* are in their blocks: compute may read them.

        False when that took too long, or the load failed or was dropped; also when it ended more than a thousand loads
        ago. Whether its result has been collected does not matter. A load that is not ``by_layer`` is there as a whole
        or not at all.
        """
        ...

    def shutdown(self, timeout_s: float) -> bool:
        """Drop what is queued, let what runs end; True when nothing touches pool or device any more.

        May be called again. Every submitted job still gets its result. Not to be called from ``on_finished``.
        """
        ...
