"""What the deciding part asks the acting part to do. Plain data, in the order in which it is to be done.

Order that must hold for each tier: a request's ``TellNewRequest`` comes before its jobs, its ``TellRequestFinished``
after its last job. Loads may overtake stores, and nothing else may overtake anything.

All actions of one request carry the same ``RequestInfo`` object, and no other request does, whatever its id: ids may be
used again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_core.keys import OffloadKey
from kvtier_core.values import RequestInfo


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job without its buffers; ``rows`` is empty for a lookup, ``tier`` for sealing."""

    id: int
    tier: str
    request: RequestInfo
    keys: Sequence[OffloadKey]
    rows: Sequence[int]
    deadline: float
    is_prefix: bool = False
    """Of a lookup: behind the first key that the tier lacks no answer is needed."""


@dataclass(frozen=True, slots=True)
class AskTier:
    """Hand a lookup job to the tier."""

    job: JobPlan


@dataclass(frozen=True, slots=True)
class LoadFromTier:
    """Hand a load job to the tier; its rows are checked before the result comes back."""

    job: JobPlan


@dataclass(frozen=True, slots=True)
class StoreToTiers:
    """Seal the rows of *seal* and report that, then hand each store job to its tier.

    ``seal`` is ``None`` when every row has its proof, or gets it from an earlier action.
    """

    seal: JobPlan | None
    jobs: Sequence[JobPlan]


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


Action = (
    AskTier
    | LoadFromTier
    | StoreToTiers
    | TellNewRequest
    | TellRequestFinished
    | CancelJobs
    | TellStepEnd
    | TellTouched
)
