"""``TierPort``: what the manager asks of one tier, whichever interface its author chose.

There are two: ``BlockingTier`` for subclasses of ``BlockTier``, ``HookTier`` for plugins on the hook specs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier_core.coordinator import JobKind
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.events import Event
from kvtier_core.manager.guard import Guard, TierIdentity
from kvtier_core.tier_settings import TierLimits
from kvtier_core.values import JobResult, PoolView, RequestInfo, TierContext, TierInfo, TierJob


class Rows(Protocol):
    """The pool's rows as a tier gets them. Each call makes a view of its own."""

    def to_store(self, row: int) -> memoryview:
        """The row, read-only."""
        ...

    def to_load(self, row: int) -> memoryview:
        """The row, writable, without the proof of what it held."""
        ...


class RequestListener(Protocol):
    """The part of a port for tiers that want to know about requests. From any thread; returns at once."""

    def begin_request(self, request: RequestInfo) -> None:
        """A request begins. Comes before its jobs."""
        ...

    def end_request(self, request: RequestInfo, not_stored: Sequence[OffloadKey]) -> None:
        """A request is over. Comes after its last job; the tier was never given *not_stored*."""
        ...

    def end_step(self, step: int) -> None:
        """The jobs of an engine's step have been submitted."""
        ...


class TierPort(Protocol):
    """One tier. Methods may be called from any thread and return at once, except ``wait_down``.

    Each job that is submitted ends with one call of ``TierHome.finish``. Everything else is reported by events.
    """

    identity: TierIdentity
    listener: RequestListener | None
    """``None`` for a tier that is told nothing about requests."""

    def start(self, pool: PoolView | None) -> None:
        """Build the tier and open it on a thread of its own, reported as ``Serving`` or ``OpenFailed``.

        Raises what the tier's constructor raises.
        """
        ...

    def submit(self, kind: JobKind, job: TierJob) -> None:
        """Hand a lookup, load or store to the tier. The port gets the job's buffers by its rows."""
        ...

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Nobody waits for these jobs any more. Their results are still due."""
        ...

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks gave wrong bytes: the tier is to forget them."""
        ...

    def touch(self, keys: Sequence[OffloadKey], chain: int) -> None:
        """The request with the number *chain* used these blocks from the pool, its beginning first."""
        ...

    def ask_changes(self) -> bool:
        """Ask what changed in the tier, reported as ``Changed``. False for a tier that does not say."""
        ...

    def reset(self, namespace: str, description: Mapping[str, Any], generation: int) -> None:
        """Serve *namespace* from now on, reported as ``Serving`` with this *generation*."""
        ...

    def shutdown(self, timeout_s: float) -> None:
        """Begin to shut the tier down, within *timeout_s*."""
        ...

    def wait_down(self, timeout_s: float) -> bool:
        """Wait for the end of ``shutdown``. Whether the tier has confirmed that it no longer touches the pool."""
        ...


@dataclass(frozen=True, kw_only=True)
class TierHome:
    """What a port gets from the manager."""

    guard: Guard
    info: TierInfo
    limits: TierLimits
    context: TierContext
    rows: Rows
    clock: Callable[[], float]
    emit: Callable[[Event], None]
    finish: Callable[[JobResult], None]


MakePort = Callable[[TierHome], TierPort]
"""Makes the port of a configured tier; does no I/O."""
