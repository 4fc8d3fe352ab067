"""The ends of jobs, by their result or their deadline, as changes of the shared state.

All keys count that a result does not name as bad (C22b, C23). A result comes once for each job of a tier, and fits it:
the tier's port has seen to that (C30).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvtier_core.coordinator.cascades import Cascades
from kvtier_core.coordinator.jobs import Job, JobKind
from kvtier_core.coordinator.promotions import Promotions
from kvtier_core.coordinator.request_level import RequestLevel
from kvtier_core.coordinator.state import State
from kvtier_core.coordinator.tier_record import TierRecord
from kvtier_core.keys import OffloadKey
from kvtier_core.values import JobResult, MissReason

Bad = Mapping[OffloadKey, MissReason]
"""The keys of a job without bytes or answer, and why."""

Arrived = Callable[[int], Collection[OffloadKey]]
"""Says which keys of an unanswered load are in their rows, whole and checked."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A tier's result as the acting part hands it in: ``corrupt`` are loaded keys whose proof did not hold."""

    result: JobResult
    corrupt: Sequence[OffloadKey] = ()


class Results:
    """Ends jobs on the shared state."""

    def __init__(
        self,
        state: State,
        cascades: Cascades,
        promotions: Promotions,
        request_level: RequestLevel,
    ) -> None:
        self._state = state
        self._cascades = cascades
        self._promotions = promotions
        self._request_level = request_level

    def finish(self, finished: Finished, now: float) -> None:
        """A tier handed out the result of one of its jobs."""
        state = self._state
        job = state.end_job(finished.result.job_id)
        tier = state.tiers[job.tier]
        bad = bad_keys(job, finished)
        seconds = None if job.overdue else self._note_service(tier, job, bad, finished.result, now)
        if job.kind is JobKind.LOOKUP:
            tier.counters.timeouts += MissReason.TIER_SLOW in bad.values() and not job.overdue
            if not job.stale:
                tier.presence.take_answer(job, finished.result, bad, now)
        elif job.kind is JobKind.TIER_STORE:
            self._cascades.finish(job, bad, finished.result.held, now)
            self._request_level.give_late(now)
        else:
            why = Counter(bad.values())
            tier.counters.integrity += why[MissReason.INTEGRITY]
            tier.counters.load_missing += why[MissReason.NOT_STORED]
            tier.counters.load_failed += why[MissReason.TIER_FAILED]
            if seconds is not None and not why[MissReason.TIER_FAILED] and len(bad) < len(job.keys):
                tier.load_times.add(len(job.keys) - len(bad), seconds)
            self._promotions.finish(job, bad, now)
            self._request_level.arrived(job.blocks, None, now)

    @staticmethod
    def _note_service(tier: TierRecord, job: Job, bad: Bad, result: JobResult, now: float) -> float:
        """Tell the tier's breaker of the result of *job*, which came in time. The seconds that it took."""
        service = tier.service(job.kind)
        says_nothing = job.kind is JobKind.LOOKUP and len(bad) == len(job.keys)
        faulty = says_nothing or MissReason.TIER_FAILED in bad.values()
        if faulty and not job.stale:
            service.breaker.failed(now)
        elif not faulty and (job.kind is JobKind.LOOKUP or _has_moved(job, bad, result)):
            service.breaker.succeeded()
        else:  # a reset ended it, or nothing moved
            service.breaker.withdrawn()
        return service.count_time(job, now)

    def expire(self, job: Job, arrived: Arrived, now: float) -> None:
        """The deadline of *job* passed. *arrived* is asked what has come of a load."""
        if job.kind is JobKind.DEVICE_STORE:
            self._cascades.expire_device_store(job)
            self._request_level.lost(job.blocks)
            return
        tier = self._state.tiers[job.tier]
        tier.counters.timeouts += 1
        tier.service(job.kind).breaker.failed(now)
        if job.kind is JobKind.TIER_STORE:
            self._cascades.expire(job)
            self._request_level.give_late(now)
        elif job.kind is JobKind.TIER_LOAD:
            tier.load_times.add(len(job.keys), tier.loads.timeout_s)
            self._promotions.expire(job, arrived(job.id), now)
            self._request_level.arrived(job.blocks, None, now)
        else:  # nothing is remembered of the tier: the next request that asks may be answered
            tier.presence.unask(job.keys, job.id)
            self._promotions.note_lost(job, dict.fromkeys(job.keys, MissReason.TIER_SLOW), now)


def _has_moved(job: Job, bad: Bad, result: JobResult) -> bool:
    """Whether bytes moved. That a block is absent, or was there before, may be known without the storage."""
    absent = [key for key, reason in bad.items() if reason is MissReason.NOT_STORED]
    return not set(job.keys) <= {*absent, *result.held}


def bad_keys(job: Job, finished: Finished) -> dict[OffloadKey, MissReason]:
    """The bad keys of *job*. Of a lookup, ``TIER_SLOW`` are those that the tier had no answer for in time."""
    result, answers = finished.result, finished.result.present
    is_lookup = job.kind is JobKind.LOOKUP
    bad = {} if is_lookup else dict.fromkeys(result.missing, MissReason.NOT_STORED)
    bad.update(dict.fromkeys(finished.corrupt, MissReason.INTEGRITY))
    bad.update(dict.fromkeys(result.failed, MissReason.TIER_FAILED))
    if (result.error is not None and not bad) or (is_lookup and answers is None):
        return dict.fromkeys(job.keys, MissReason.TIER_FAILED)
    if answers is not None:
        # A prefix ends at the first key that is not there: what follows needs no answer.
        end = answers.index(False) if job.is_prefix and False in answers else len(answers)
        for key, there in zip(job.keys[:end], answers, strict=False):
            if there is None:
                bad.setdefault(key, MissReason.TIER_SLOW)
    return bad
