"""What a tier's result says of its job: which keys were not moved, and why, and whether any bytes moved. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvtier_core.coordinator.jobs import Job, JobKind
from kvtier_core.coordinator.presence import bad_answers
from kvtier_core.keys import OffloadKey
from kvtier_core.values import JobResult, MissReason


@dataclass(frozen=True, slots=True)
class Finished:
    """A tier's result as the acting part hands it in: ``corrupt`` are loaded keys whose proof did not hold."""

    tier: str
    result: JobResult
    corrupt: Sequence[OffloadKey] = ()


Arrived = Callable[[int], Collection[OffloadKey]]
"""Says which keys of a load are in their rows, whole and checked, though its tier has not answered the job."""


def has_moved(job: Job, bad: Mapping[OffloadKey, MissReason], result: JobResult) -> bool:
    """Whether bytes moved: that a block is not there, or was there before, may be known without the storage."""
    absent = [key for key, reason in bad.items() if reason is MissReason.NOT_STORED]
    return not set(job.keys) <= {*absent, *result.held}


def bad_keys(job: Job, finished: Finished) -> dict[OffloadKey, MissReason] | None:
    """Why which keys of *job* were not moved, or told of; ``None`` for a result that makes no sense."""
    result = finished.result
    if job.kind is JobKind.LOOKUP:
        return bad_answers(job, result)
    bad = dict.fromkeys(result.missing, MissReason.NOT_STORED)
    bad.update(dict.fromkeys(finished.corrupt, MissReason.INTEGRITY))
    bad.update(dict.fromkeys(result.failed, MissReason.TIER_FAILED))
    if not set(job.keys).issuperset([*bad, *result.held]):
        return None
    if result.error is not None and not bad:
        return dict.fromkeys(job.keys, MissReason.TIER_FAILED)
    return bad
