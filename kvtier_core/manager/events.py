"""What the acting part's threads report to the engine's thread, through one queue."""

from dataclasses import dataclass

from kvtier_core.coordinator.presence import ResidentPresence
from kvtier_core.coordinator.results import Finished
from kvtier_core.values import RequestInfo


@dataclass(frozen=True, slots=True)
class TierFault:
    """A tier raised outside of a job, or handed out nonsense."""

    tier: str
    of_job: bool = False
    """Whether it was a job's result, which is reported as failed as well."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """The rows of a sealing job have their proofs."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Serving:
    """A tier has opened, or has gone over to the current namespace number *generation*."""

    tier: str
    generation: int
    resident: ResidentPresence | None


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """A tier could not open, or go over to another namespace. *error* says why, without secrets."""

    tier: str
    error: str
    is_explained: bool
    """Whether *error* says what to do."""
    will_retry: bool
    is_reset: bool
    """Whether the tier is open and could not go over."""


@dataclass(frozen=True, slots=True)
class WholeRequest:
    """A tier wants all blocks of a request (``OffloadPolicy.REQUEST_LEVEL``)."""

    tier: str
    request: RequestInfo


@dataclass(frozen=True, slots=True)
class Wake:
    """Somebody outside the tiers (a device) wants the waiting engine's thread to look."""


Event = Finished | TierFault | Sealed | Serving | OpenFailed | WholeRequest | Wake
