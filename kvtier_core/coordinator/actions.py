"""Actions: the coordinator's orders to the manager, as plain data, to be carried out in order.

At each tier, a request's ``TellNewRequest`` comes before its jobs, and its ``TellRequestFinished`` after its last job.
Loads may overtake stores, and nothing else may overtake anything. All actions of a request carry its own
``RequestInfo`` object, which tells it from later requests of the same id.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.keys import OffloadKey
from kvtier_core.values import RequestInfo, TierJob


@dataclass(frozen=True, slots=True)
class SealRows:
    """Write the proofs into the rows of *job* and report that. Later stores leave after it."""

    job: TierJob


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """Hand a job to a tier. A store leaves after every ``SealRows`` before it; a load's rows are checked at its end."""

    tier: str
    kind: JobKind
    job: TierJob
    """Without buffers: the tier's port fills them in."""


@dataclass(frozen=True, slots=True)
class TellNewRequest:
    """Call ``on_new_request``."""

    tier: str
    request: RequestInfo


@dataclass(frozen=True, slots=True)
class TellRequestFinished:
    """Call ``on_request_finished``, after every store job handed out before; *not_stored* is for the tier's copy."""

    tier: str
    request: RequestInfo
    not_stored: Sequence[OffloadKey] = ()


@dataclass(frozen=True, slots=True)
class CancelJobs:
    """Call ``cancel_jobs``: nobody waits for these any more."""

    tier: str
    job_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TellStepEnd:
    """Call ``on_schedule_end``."""

    tier: str
    step: int


@dataclass(frozen=True, slots=True)
class TellTouched:
    """Call ``touch``: these keys were used from the pool, by the request with the number *chain*."""

    tier: str
    keys: Sequence[OffloadKey]
    chain: int


Action = SealRows | SubmitJob | TellNewRequest | TellRequestFinished | CancelJobs | TellStepEnd | TellTouched
