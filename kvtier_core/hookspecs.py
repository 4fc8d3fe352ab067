"""The hook specs of the tier interface, major 1 (entry-point group ``kvtier.tiers.v1``).

The core gives each tier instance a plugin manager of its own and calls its hooks one at a time, in order, on the
instance's own hook thread; no hook is ever called on an engine's thread. A hook should hand work to the tier's own
threads and return: while it runs, the instance's other hooks wait. Whatever a hook raises is caught, counted
against the tier and turned into a failed job or a miss.

Required: ``lookup``, ``submit_store``, ``submit_load``, ``get_finished_jobs``. The others are optional.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

from kvtier_core.keys import OffloadKey
from kvtier_core.values import JobResult, OffloadPolicy, PoolView, RequestInfo, TierJob

PROJECT = "kvtier"
API_MAJOR = 1
TIER_GROUP = "kvtier.tiers.v1"
REQUIRED_HOOKS = ("lookup", "submit_store", "submit_load", "get_finished_jobs")

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class TierHookSpecs:
    """The hooks, with their exact arguments. Implementations mark theirs with ``hookimpl``."""

    @hookspec(firstresult=True)
    def lookup(self, job: TierJob) -> Sequence[bool | None] | None:
        """Say which of ``job.keys`` the tier holds, one bool each, in order.

        Return ``None`` when the answer takes I/O: it is then due as ``JobResult.present``. Cost: no I/O here.

        A part of an answer counts. Example: of 1,000 keys the storage has told 700 shortly before ``job.deadline``. A
        result then, with ``None`` for the other 300, makes the 700 known, and the 300 are asked again. An answer after
        the deadline serves later requests alone. Where ``job.is_prefix``, what follows the first key that is not there
        needs no answer: it may be ``None``, and the storage need not be asked.
        """

    @hookspec(firstresult=True)
    def submit_store(self, job: TierJob) -> None:
        """Start storing ``job.buffers`` under ``job.keys`` and return at once.

        A key must become visible to ``lookup`` whole or not at all. The buffers are read-only and valid until the
        job's result has been handed out by ``get_finished_jobs``. A tier that does not want a block declines it, which
        is no fault, by naming its key in ``JobResult.missing``.
        """

    @hookspec(firstresult=True)
    def submit_load(self, job: TierJob) -> None:
        """Start filling ``job.buffers`` with the rows stored under ``job.keys`` and return at once.

        After the job's result, or when this hook raises, the buffers must never be written again.
        """

    @hookspec(firstresult=True)
    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Hand out the results that are ready, each job's exactly once. Must not wait."""

    @hookspec(firstresult=True)
    def on_open(self, pool: PoolView | None) -> None:
        """Open the storage; called before any other hook. ``None`` when a tool opens the tier without a pool.

        Raise ``TierOpenError`` when the tier can't work as configured, or not now. Called once; after it has raised
        again, where ``limits.open_retry`` is set, until it returns.
        """

    @hookspec(firstresult=True)
    def on_new_request(self, request: RequestInfo) -> OffloadPolicy | None:
        """A request begins. ``None`` means ``OffloadPolicy.BLOCK_LEVEL``: the tier gets the blocks it computes.

        With ``REQUEST_LEVEL`` the tier gets every block that is offered of the request from then on, those that the
        pool held already too, each once; what came before this answer is not made up for. The same holds, without
        asking, for a request whose ``params`` say ``do_remote_decode``.
        """

    @hookspec(firstresult=True)
    def on_request_finished(self, request: RequestInfo) -> None:
        """A request ended: no submit for it follows. Called exactly once; its jobs may still be running.

        To a tier that gets whole requests, ``request.not_stored`` names the keys that it was never given.
        """

    @hookspec(firstresult=True)
    def on_schedule_end(self, step: int) -> None:
        """A step of the engine ended and its jobs have been submitted: a good moment to send a batch."""

    @hookspec(firstresult=True)
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """These keys were used from a warmer tier; a tier that bounds itself may count it as recency."""

    @hookspec(firstresult=True)
    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks gave wrong bytes: do not hand them out again until they are stored anew.

        Deleting them may take its time. On a storage that others use, read a block again before you delete it: a bad
        path on this machine must not empty the store of all. Example: a client marks the keys, and a thread of its own
        reads each once more.
        """

    @hookspec(firstresult=True)
    def cancel_jobs(self, job_ids: Sequence[int]) -> None:
        """Nobody waits for these jobs any more. Best effort; their results are still due."""

    @hookspec(firstresult=True)
    def drain_jobs(self, timeout_s: float) -> Sequence[int]:
        """Wait up to *timeout_s* for submitted jobs; return the ids of those that may still touch the pool."""

    @hookspec(firstresult=True)
    def reset(self, namespace: str, description: Mapping[str, Any]) -> None:
        """Serve only *namespace* from now on; jobs submitted before must not surface under it.

        *description* is the new namespace in readable form, as ``TierContext.description`` was of the first. After it
        has raised it is called again from time to time, until it returns: the tier is left out meanwhile.
        """

    @hookspec(firstresult=True)
    def shutdown(self, timeout_s: float) -> None:
        """Stop within *timeout_s*. Afterwards nothing may touch the pool.

        May be called again, where it raised or jobs were left. A tier without this hook and without ``drain_jobs`` is
        down when all its loads and stores have their results.
        """
