"""A session's requests and their device transfers: handed to the device, waited for, taken in when they have ended."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtier_core.manager.manager import TierManager
from kvtier_core.prompts import HashedPrompt
from kvtier_core.transfer.device import Device
from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.plan import GroupTransfer
from kvtier_core.values import PreparedTransfer, RequestInfo


@dataclass(eq=False)
class Request:
    """One request, between ``begin`` and ``end``."""

    info: RequestInfo
    prompt: HashedPrompt
    offered: int = 0
    """Leading blocks of the prompt that are in the pool already or have been offered to it."""
    has_begun: bool = False
    """Whether KV was loaded or computed for it."""
    load_job: int | None = None
    load_tokens: int = 0
    """Tokens that a load brings or has brought; none when it failed."""
    hits: Counter[str] = field(default_factory=Counter)
    """Loaded tokens by where they came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A device transfer that is under way."""

    direction: Direction
    request: Request
    hits: Mapping[str, int] = field(default_factory=dict)
    """Of a load: its tokens by where they come from."""
    offered: int = 0
    """Of a store: how many blocks of the prompt had been offered before it."""


class Transfers:
    """The transfers under way between the pool and *device*."""

    def __init__(self, manager: TierManager, device: Device) -> None:
        self._manager = manager
        self._device = device
        self._running: dict[int, Transfer] = {}
        self.hit_tokens: Counter[str] = Counter()
        """Tokens loaded, by where they came from."""

    def __bool__(self) -> bool:
        """Whether any is under way."""
        return bool(self._running)

    def start(self, prepared: PreparedTransfer, transfer: Transfer, parts: Sequence[GroupTransfer]) -> None:
        """Hand *parts*, which use the rows of *prepared*, to the device. When that raises, the transfer is over."""
        try:
            self._device.submit(transfer.direction, prepared.job_id, parts)
        except BaseException:
            self._complete(prepared.job_id, transfer, success=False)
            raise
        self._running[prepared.job_id] = transfer

    def take_in(self) -> None:
        """Pass on what the device has finished."""
        for result in self._device.get_finished():
            self._complete(result.job_id, self._running.pop(result.job_id), success=result.ok)

    def _complete(self, job_id: int, transfer: Transfer, *, success: bool) -> None:
        request = transfer.request
        if transfer.direction is Direction.STORE:
            self._manager.commit_store(job_id, success=success)
            if not success:
                request.offered = min(request.offered, transfer.offered)
            return
        self._manager.commit_load(job_id, success=success)
        if success:
            self.hit_tokens.update(transfer.hits)
        if request.load_job == job_id:
            request.load_job = None
            if success:
                request.hits.update(transfer.hits)
            else:
                request.load_tokens = 0

    def wait(self, direction: Direction, request_id: str, timeout_s: float) -> None:
        """Wait for the transfers of a request in one direction. Raises ``TimeoutError`` when they take longer."""
        jobs = [
            job
            for job, transfer in self._running.items()
            if transfer.direction is direction and transfer.request.info.request_id == request_id
        ]
        if not self._device.wait(direction, jobs, timeout_s):
            raise TimeoutError(
                f"the device has not finished {direction.value} jobs {jobs} of request {request_id!r} within "
                f"{timeout_s:g} s"
            )
        self.take_in()
