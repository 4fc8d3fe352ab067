"""What the tiers are known to hold of some keys, as one verdict a key; what is unknown is asked, in one job a tier.

A verdict names the first tier in configured order that holds the key, once the tiers before it have said no or may
not be waited for any longer. Decides nothing about rows.
"""

from collections.abc import Iterable, Sequence

from kvtier_core.coordinator.actions import AskTier
from kvtier_core.coordinator.state import JobKind, RequestState, State, TierState
from kvtier_core.keys import OffloadKey
from kvtier_core.values import MissReason

Verdict = str | MissReason | None
"""The tier to load from, why there is none, or ``None`` while a tier has not said."""

_NEVER_STORED = MissReason.NEVER_STORED
_TELLING = (MissReason.INTEGRITY, MissReason.TIER_FAILED, MissReason.TIER_SLOW)
"""Reasons worth more than "never stored", most telling first."""


class TierAnswers:
    """Verdicts on the shared state."""

    def __init__(self, state: State) -> None:
        self._state = state

    def judge(
        self, request: RequestState, keys: Sequence[OffloadKey], now: float
    ) -> dict[OffloadKey, Verdict]:
        """A verdict for each of *keys*, none of which the pool holds. Cost: proportional to the keys and tiers."""
        verdicts: list[Verdict] = [_NEVER_STORED] * len(keys)
        decided = [False] * len(keys)
        for tier in self._state.tiers.values() if keys else ():
            if not request.may_load_from(tier.name):
                continue
            for index, answer in enumerate(self._ask(request, tier, keys, now)):
                if decided[index]:
                    continue
                if isinstance(answer, MissReason):
                    verdicts[index] = _more_telling(verdicts[index], answer)
                else:
                    decided[index] = True
                    verdicts[index] = answer
        verdicts = [
            self._why_never_stored(key) if verdict is _NEVER_STORED else verdict
            for key, verdict in zip(keys, verdicts, strict=True)
        ]
        judged = dict(zip(keys, verdicts, strict=True))
        self._bound_waiting(request, judged, now)
        return judged

    def sure_miss(self, request: RequestState, key: OffloadKey, now: float) -> MissReason | None:
        """Why *key*, which the pool lacks, is in no tier; ``None`` while a tier may have it. Asks nobody."""
        verdict = _NEVER_STORED
        for tier in self._state.tiers.values():
            if request.may_load_from(tier.name):
                answer = tier.presence.classify((key,), now)[0]
                if not isinstance(answer, MissReason):
                    return None
                verdict = _more_telling(verdict, answer)
        return self._why_never_stored(key) if verdict is _NEVER_STORED else verdict

    def _why_never_stored(self, key: OffloadKey) -> MissReason:
        if key in self._state.evicted:
            return MissReason.EVICTED
        if self._state.admission.is_below(key):
            return MissReason.BELOW_THRESHOLD
        return _NEVER_STORED

    def _bound_waiting(self, request: RequestState, verdicts: dict[OffloadKey, Verdict], now: float) -> None:
        """No request waits longer than the slowest tier may take, however often answers lapse and are asked again."""
        unknown = [key for key, verdict in verdicts.items() if verdict is None]
        if not unknown:
            request.wait_until = None
            return
        if request.wait_until is None:
            request.wait_until = now + self._state.slowest_lookup_s
        if now >= request.wait_until:
            verdicts.update(dict.fromkeys(unknown, MissReason.TIER_SLOW))

    def _ask(
        self, request: RequestState, tier: TierState, keys: Sequence[OffloadKey], now: float
    ) -> list[Verdict]:
        """What *tier* is known to hold; unknown keys are asked of it, all in one job."""
        answers = tier.presence.classify(keys, now)
        unknown = [
            key
            for key, answer in zip(keys, answers, strict=True)
            if answer is None and not tier.presence.is_asked(key)
        ]
        if unknown and tier.may_ask(now):
            job = self._state.start_job(
                JobKind.LOOKUP, request, unknown, (), now + tier.limits.lookup_timeout, tier.name
            )
            tier.presence.ask(unknown, job.id)
            tier.lookup_breaker.submitted()
            self._state.outbox.append(AskTier(self._state.plan(job)))
        failed = MissReason.TIER_FAILED
        there: Verdict = tier.name if tier.may_promote(now) else failed
        verdicts: list[Verdict] = []
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, MissReason):
                verdicts.append(answer)
            elif answer:
                verdicts.append(there)
            else:
                verdicts.append(None if tier.presence.is_asked(key) else failed)
        return verdicts

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


def _more_telling(one: Verdict, other: MissReason) -> MissReason:
    if other is _NEVER_STORED and isinstance(one, MissReason):
        return one
    return next((reason for reason in _TELLING if reason in (one, other)), other)
