"""What the tiers are known to hold of some keys, as one verdict a key; what is unknown is asked, in one job a tier.

A verdict names the first tier in configured order that holds the key, once the tiers before it have said no or may
not be waited for any longer. Decides nothing about rows.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import cast

from kvtier_core.coordinator.actions import AskTier
from kvtier_core.coordinator.group_lookup import Verdict
from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.coordinator.presence import Answer
from kvtier_core.coordinator.state import RequestState, State
from kvtier_core.coordinator.tier_state import TierState
from kvtier_core.keys import OffloadKey
from kvtier_core.values import MissReason

_NEVER_STORED = MissReason.NEVER_STORED
_TELLING = (MissReason.INTEGRITY, MissReason.TIER_FAILED, MissReason.TIER_SLOW)
"""Reasons worth more than "never stored", most telling first."""


class TierAnswers:
    """Verdicts on the shared state."""

    def __init__(self, state: State) -> None:
        self._state = state

    def judge(
        self,
        request: RequestState,
        keys: Sequence[OffloadKey],
        now: float,
        passed_over: Collection[str] = (),
    ) -> list[Verdict]:
        """A verdict for each of *keys*, none of which the pool holds, by all tiers but those *passed_over*.

        Cost: proportional to the keys and tiers.
        """
        verdicts: list[Verdict] | None = None
        for tier in self._state.tiers.values() if keys else ():
            if not request.may_load_from(tier.name) or tier.name in passed_over:
                continue
            answers = self._ask(request, tier, keys, now)
            verdicts = answers if verdicts is None else list(map(_first_of, verdicts, answers))
        if verdicts is None:
            verdicts = [MissReason.NEVER_STORED] * len(keys)
        return verdicts

    def sure_miss(self, request: RequestState, key: OffloadKey, now: float) -> MissReason | None:
        """Why *key*, which the pool lacks, is in no tier; ``None`` while a tier may have it. Asks nobody."""
        verdict: Verdict = _NEVER_STORED
        for tier in self._state.tiers.values():
            if request.may_load_from(tier.name):
                answer = tier.presence.classify((key,), now)[0]
                if not isinstance(answer, MissReason):
                    return None
                verdict = _first_of(verdict, answer)
        assert isinstance(verdict, MissReason)
        return verdict

    def bound_waiting(self, request: RequestState, verdicts: list[Verdict], now: float) -> list[Verdict]:
        """*verdicts*, in which nothing is unknown any more once the request has waited long enough.

        That is as long as the slowest tier may take, however often answers lapse and are asked again.
        """
        if None not in verdicts:
            return verdicts
        if request.wait_until is None:
            request.wait_until = now + self._state.slowest_lookup_s
        if now >= request.wait_until:
            return [MissReason.TIER_SLOW if verdict is None else verdict for verdict in verdicts]
        return verdicts

    def _ask(
        self, request: RequestState, tier: TierState, keys: Sequence[OffloadKey], now: float
    ) -> list[Verdict]:
        """What *tier* is known to hold; unknown keys are asked of it, all in one job."""
        presence = tier.presence
        answers = presence.classify(keys, now)
        if tier.name in request.not_loaded:
            answers = self._without_lost(request, tier, keys, answers, now)
        if None in answers:
            unknown = presence.not_asked(keys, answers)
            if unknown and tier.may_ask(now):
                job = self._state.start_job(
                    JobKind.LOOKUP, request, unknown, (), now + tier.limits.lookup_timeout, tier.name
                )
                presence.ask(job.keys, job.id)
                tier.lookup_breaker.submitted()
                self._state.outbox.append(AskTier(self._state.plan(job)))
            elif unknown:
                refused = set(unknown)
                answers = [
                    MissReason.TIER_FAILED if answer is None and key in refused else answer
                    for key, answer in zip(keys, answers, strict=True)
                ]
        if True not in answers:
            return cast("list[Verdict]", answers)
        there: Verdict = tier.name if tier.may_promote(now) else MissReason.TIER_FAILED
        return [there if answer is True else answer for answer in answers]

    @staticmethod
    def _without_lost(
        request: RequestState,
        tier: TierState,
        keys: Sequence[OffloadKey],
        answers: Sequence[Answer],
        now: float,
    ) -> list[Answer]:
        """*answers*, but a miss for what *request* has tried to load in vain: it must not try for ever (K6)."""
        lost = request.not_loaded[tier.name]
        told: list[Answer] = []
        for key, answer in zip(keys, answers, strict=True):
            until, reason = lost.get(key, (now, None))
            told.append(reason if until > now else answer)
        return told

    def wait_for(self, request: RequestState, unknown: Iterable[OffloadKey]) -> bool:
        """Have *request* woken when a tier says what it holds of *unknown*; whether there is anything to wait for."""
        waits = False
        for key in unknown:
            self._state.unsure.setdefault(key, {})[request] = None
            request.unsure.append(key)
            for tier in self._state.tiers.values():
                job = self._state.jobs.get(tier.presence.asked_in(key))
                if job is not None and not job.overdue:
                    job.waiters[request] = None
                    waits = True
        return waits


def _first_of(verdict: Verdict, answer: Verdict) -> Verdict:
    """The verdict of the tiers so far and of the next one."""
    if not isinstance(verdict, MissReason):
        return verdict
    if not isinstance(answer, MissReason):
        return answer
    return next((reason for reason in _TELLING if reason in (verdict, answer)), answer)
