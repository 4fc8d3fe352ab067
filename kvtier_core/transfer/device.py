"""The device's interface: how an engine's worker moves blocks between the device and the pool (C40, C41, C42)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.plan import GroupTransfer


@dataclass(frozen=True, kw_only=True)
class TransferResult:
    """How one device transfer ended. ``ok``: every byte moved, ``bytes`` in ``seconds`` of copying.

    ``dropped``: nothing was touched, because the device was shutting down. ``error`` says why a job failed; what it was
    to write is then undefined.
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

    A transfer is a list of parts, of one KV group or several. Job ids grow within a direction, over the pool's whole
    life. The parts' ids are copied at submission. Between submission and result the caller keeps others from writing
    what a transfer reads, and from touching what it writes.
    """

    def submit(self, direction: Direction, job_id: int, parts: Sequence[GroupTransfer]) -> None:
        """Copy blocks to rows (a store) or rows to blocks (a load). Returns at once, on a GPU if rows are pinned.

        Either follows all compute that the caller has queued by now, such as what writes the blocks of a store, or
        zeroes those of a load. Raises ``ValueError`` when the job id does not grow or the pool is closed,
        ``RuntimeError`` after ``shutdown``.
        """
        ...

    def get_finished(self) -> list[TransferResult]:
        """The results since the last call, each job's once: all its bytes are there. Never waits."""
        ...

    def wait(self, direction: Direction, job_ids: Iterable[int], timeout_s: float) -> bool:
        """Block until none of these jobs is running or queued; False when that took too long.

        For preemption and block reuse. Jobs that have ended, collected or not, count as ended. *timeout_s* may be
        ``math.inf``. Not to be called from ``on_finished``.
        """
        ...

    def shutdown(self, timeout_s: float) -> bool:
        """Drop what has not begun, let the rest end; True when nothing touches pool or device any more.

        May be called again. Every submitted job still gets its result. Not to be called from ``on_finished``.
        """
        ...
