"""Presence: what is known of one tier's contents. Pure; time comes in; every memory here is bounded.

Two sources, the stronger first: what the tier has told of a key lately (an answer, or that it could not be had, with
the reason, until something changes), and the tier's resident presence set where it has one.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

from kvtier_core.coordinator.jobs import Job
from kvtier_core.keys import OffloadKey
from kvtier_core.values import JobResult, MissReason


class ResidentPresence(Protocol):
    """A tier's own, always current set of keys, readable from the engine's thread without I/O."""

    @property
    def complete(self) -> bool:
        """Whether it still holds every key. Once the tier has more than it remembers, the tier is asked."""
        ...

    def contains_many(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """One bool a key, in order."""
        ...


Answer = Literal[True] | MissReason | None
"""What is known of one key: it is there, why it is not, or nothing."""

_NOT_STORED = MissReason.NOT_STORED


class Presence:
    """One tier's contents, known without asking."""

    def __init__(self, *, ttl_s: float, miss_ttl_s: float, limit: int) -> None:
        self.resident: ResidentPresence | None = None
        self._ttl = ttl_s
        self._miss_ttl = miss_ttl_s
        self._limit = limit
        self._told: OrderedDict[OffloadKey, tuple[float, Answer]] = OrderedDict()
        """Answers to questions, and keys that could not be had, each until when; at most *limit*, the oldest first."""
        self._asked: dict[OffloadKey, int] = {}

    def classify(self, keys: Sequence[OffloadKey], now: float) -> list[Answer]:
        """For each key: True (there), a reason (not there), or ``None`` (unknown, perhaps already asked)."""
        held = self._held()
        answers: list[Answer] = [None] * len(keys)
        if held is not None:
            answers = [True if there else _NOT_STORED for there in held.contains_many(keys)]
        if not self._told:
            return answers
        return [self._remembered(key, now) or answer for key, answer in zip(keys, answers, strict=True)]

    def _remembered(self, key: OffloadKey, now: float) -> Answer:
        until, answer = self._told.get(key, (now, None))
        if until > now:
            return answer
        self._told.pop(key, None)
        return None

    def _remember(self, key: OffloadKey, answer: Answer, until: float) -> None:
        self._told[key] = until, answer
        self._told.move_to_end(key)
        if len(self._told) > self._limit:
            self._told.popitem(last=False)

    def _held(self) -> ResidentPresence | None:
        return self.resident if self.resident is not None and self.resident.complete else None

    def holds_any(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether ``classify`` may say True of any of *keys*. Cost: one membership test a key."""
        held = self._held()
        if held is not None and True in held.contains_many(keys):
            return True
        return bool(self._told) and not self._told.keys().isdisjoint(keys)

    def not_asked(self, keys: Sequence[OffloadKey], answers: Sequence[Answer]) -> list[OffloadKey]:
        """The keys whose answer is unknown and that no question under way is about."""
        asked = self._asked
        return [key for key, answer in zip(keys, answers, strict=True) if answer is None and key not in asked]

    def asked_in(self, key: OffloadKey) -> int:
        """The job that asks about *key*, 0 when there is none."""
        return self._asked.get(key, 0)

    def ask(self, keys: Iterable[OffloadKey], job_id: int) -> None:
        """A question about *keys* leaves as *job_id*."""
        self._asked.update(dict.fromkeys(keys, job_id))

    def unask(self, keys: Iterable[OffloadKey], job_id: int) -> None:
        """Nobody waits for *job_id*'s answer any more."""
        for key in keys:
            if self._asked.get(key) == job_id:
                del self._asked[key]

    def take_answer(
        self, job: Job, result: JobResult, bad: Mapping[OffloadKey, MissReason], now: float
    ) -> None:
        """The tier answered the question *job*, in time or late, except about its *bad* keys.

        Keys without an answer in time stay unknown. Those that failed are not asked again for a while.
        """
        self.unask(job.keys, job.id)
        for key, reason in bad.items():
            if reason is MissReason.TIER_FAILED:
                self.lost(key, reason, now)
        if len(bad) == len(job.keys):
            return
        assert result.present is not None
        said = {
            key: there
            for key, there in zip(job.keys, result.present, strict=True)
            if there is not None and key not in bad
        }
        self.answer(list(said), list(said.values()), now)

    def answer(self, keys: Sequence[OffloadKey], present: Sequence[bool], now: float) -> None:
        """The tier said which of *keys* it holds; a late answer counts too."""
        is_resident = self._held() is not None
        for key, there in zip(keys, present, strict=True):
            if is_resident:
                self._told.pop(key, None)
            else:
                self._remember(key, True if there else _NOT_STORED, now + self._ttl)

    def stored(self, keys: Sequence[OffloadKey], now: float) -> None:
        """A store of *keys* to the tier succeeded."""
        self.answer(keys, [True] * len(keys), now)

    def lost(self, key: OffloadKey, reason: MissReason, now: float) -> None:
        """*key* could not be had from the tier; don't ask again until something changes."""
        self._remember(key, reason, now + self._miss_ttl)

    def clear(self) -> None:
        """Forget everything, the resident set included: the tier serves another namespace from now on."""
        self.resident = None
        self._told.clear()
        self._asked.clear()
