"""Verdicts: which tier holds a key, from what is known. What is unknown is asked, in one job a tier.

A verdict names the first tier in configured order that holds the key, once the tiers before it have said no or may
not be waited for any longer. Decides nothing about rows.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import cast

from kvtier_core.coordinator.group_lookup import Verdict
from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.coordinator.presence import Answer
from kvtier_core.coordinator.request_state import RequestState
from kvtier_core.coordinator.state import State
from kvtier_core.coordinator.tier_record import TierRecord
from kvtier_core.keys import OffloadKey
from kvtier_core.values import MissReason

_NOT_STORED, _TIER_FAILED = MissReason.NOT_STORED, MissReason.TIER_FAILED
_TELLING = (MissReason.INTEGRITY, MissReason.TIER_FAILED, MissReason.TIER_SLOW)
"""Reasons worth more than "not stored", most telling first."""


class TierAnswers:
    """Verdicts on the shared state."""

    def __init__(self, state: State) -> None:
        self._state = state

    def judge(
        self,
        request: RequestState,
        keys: Sequence[OffloadKey],
        now: float,
        *,
        is_prefix: bool = False,
        passed_over: Collection[str] = (),
    ) -> list[Verdict]:
        """A verdict for each of *keys*, none of which the pool holds, by all tiers but those *passed_over*.

        Behind the first miss of a prefix all are misses, and no tier is asked. Cost: proportional to keys and tiers.
        """
        state = self._state
        tiers = [
            tier
            for tier in state.tiers.values()
            if keys and request.may_load_from(tier.name) and tier.name not in passed_over
        ]
        known = [self._known(request, tier, keys, now) for tier in tiers]
        verdicts = self._merge(tiers, known, keys, now)
        may_wait = request.wait_until is None or now < request.wait_until
        if may_wait and any(None in answers for answers in known):
            for tier, answers in zip(tiers, known, strict=True):
                end = _end_of_interest(answers, verdicts) if is_prefix else len(keys)
                # Past a key that only others hold, the rest is asked as a whole: not miss by miss, a round each.
                ends = is_prefix and not any(isinstance(answer, MissReason) for answer in answers[:end])
                if unknown := tier.presence.not_asked(keys[:end], answers[:end]):
                    job = state.submit(JobKind.LOOKUP, request, tier, unknown, (), now, is_prefix=ends)
                    tier.presence.ask(job.keys, job.id)
            if not all(tier.lookups.breaker.is_closed for tier in tiers):
                # A tier that is asked again after failures may be silent still: no request waits for its answer.
                known = [
                    answers
                    if tier.lookups.breaker.is_closed
                    else [answer or _TIER_FAILED for answer in answers]
                    for tier, answers in zip(tiers, known, strict=True)
                ]
                verdicts = self._merge(tiers, known, keys, now)
        if is_prefix:
            for index, verdict in enumerate(verdicts):
                if isinstance(verdict, MissReason):
                    return [*verdicts[:index], *([verdict] * (len(keys) - index))]
        return verdicts

    def sure_miss(self, request: RequestState, key: OffloadKey, now: float) -> MissReason | None:
        """Why *key*, which the pool lacks, is in no tier; ``None`` while a tier may have it. Asks nobody."""
        verdict: Verdict = _NOT_STORED
        for tier in self._state.tiers.values():
            if request.may_load_from(tier.name):
                answer = tier.presence.classify((key,), now)[0]
                if not isinstance(answer, MissReason):
                    return None
                verdict = _first_of(verdict, answer)
        assert isinstance(verdict, MissReason)
        return verdict

    def bound_waiting(self, request: RequestState, verdicts: list[Verdict], now: float) -> list[Verdict]:
        """*verdicts*, without unknown ones once the request has waited as long as the slowest tier may take.

        It waits no longer than that, however often answers lapse and are asked again.
        """
        if None not in verdicts:
            return verdicts
        if request.wait_until is None:
            request.wait_until = now + self._state.slowest_lookup_s
        if now >= request.wait_until:
            return [MissReason.TIER_SLOW if verdict is None else verdict for verdict in verdicts]
        return verdicts

    def _known(
        self, request: RequestState, tier: TierRecord, keys: Sequence[OffloadKey], now: float
    ) -> list[Answer]:
        """What *request* may take *tier* to hold. Keys that the tier may not be asked about have failed."""
        answers = tier.presence.classify(keys, now)
        # What it tried to load in vain is a miss: it must not try for ever (K6).
        lost = request.not_loaded.get(tier.name, {})
        for index, key in enumerate(keys if lost else ()):
            until, reason = lost.get(key, (now, None))
            answers[index] = reason if until > now else answers[index]
        if None in answers and not tier.may_ask(now):
            refused = set(tier.presence.not_asked(keys, answers))
            for index, key in enumerate(keys):
                if key in refused:
                    answers[index] = _TIER_FAILED
        return answers

    @staticmethod
    def _merge(
        tiers: Sequence[TierRecord], known: Sequence[Sequence[Answer]], keys: Sequence[OffloadKey], now: float
    ) -> list[Verdict]:
        verdicts: list[Verdict] | None = None
        for tier, answers in zip(tiers, known, strict=True):
            mine = cast("list[Verdict]", answers)
            if True in answers:
                there: Verdict = tier.name if tier.may_promote(now) else _TIER_FAILED
                mine = [there if answer is True else answer for answer in answers]
            verdicts = mine if verdicts is None else list(map(_first_of, verdicts, mine))
        return [_NOT_STORED] * len(keys) if verdicts is None else verdicts

    def asked_in(self, unknown: Iterable[OffloadKey]) -> set[int]:
        """The jobs, waited for, whose results will tell of *unknown*."""
        tiers, jobs = self._state.tiers.values(), self._state.jobs
        asked = {tier.presence.asked_in(key) for key in unknown for tier in tiers}
        return {job_id for job_id in asked if job_id in jobs and not jobs[job_id].overdue}


def _end_of_interest(answers: Sequence[Answer], verdicts: Sequence[Verdict]) -> int:
    """How much of a prefix a tier with these *answers* need be asked about.

    Behind a key that it lacks, and that no other is known to hold, nothing can be loaded from it.
    """
    for index, (answer, verdict) in enumerate(zip(answers, verdicts, strict=True)):
        if isinstance(answer, MissReason) and not isinstance(verdict, str):
            return index
    return len(answers)


def _first_of(verdict: Verdict, answer: Verdict) -> Verdict:
    """The verdict of the tiers so far and of the next one."""
    if not isinstance(verdict, MissReason):
        return verdict
    if not isinstance(answer, MissReason):
        return answer
    return next((reason for reason in _TELLING if reason in (verdict, answer)), answer)
