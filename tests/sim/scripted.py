"""A tier of values for the simulated world: what it stores is who wrote a row last, not bytes.

It decides nothing by itself: a job is answered when, and in the way in which, the world is told to answer it. No
thread, no clock.
"""

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from kvtier_core.keys import OffloadKey
from kvtier_core.tier_settings import TierLimits
from kvtier_core.values import JobResult, PreparedTransfer, TierInfo, TierJob

GENEROUS = TierLimits(max_cascade=1.0, max_quarantined=1.0)
"""Limits that let a tier use the whole of a tiny pool."""


class Payload(NamedTuple):
    """The whole and right bytes of one block: what a model computes for *key* in cache epoch *epoch*."""

    key: OffloadKey
    epoch: int


class Junk(NamedTuple):
    """Half-written or flipped bytes; no two are alike."""

    serial: int


class Content(NamedTuple):
    """What a row, or a tier's object, holds: a payload and, once sealed, a proof.

    The proof is modelled by what it covers (C03): the block it was made for, and the payload it was made over.
    """

    payload: Payload | Junk
    proof: tuple[Payload, Payload | Junk] | None = None

    def seal(self, name: Payload) -> "Content":
        """The same payload with a proof for the block *name*."""
        return Content(self.payload, (name, self.payload))

    def proves(self, name: Payload) -> bool:
        """Whether a check for the block *name* would accept this."""
        return self.proof == (name, self.payload)


class JunkSource:
    """Makes bytes that are nobody's, never the same twice."""

    def __init__(self) -> None:
        self._serial = 0

    def __call__(self) -> Content:
        """New junk, without a proof."""
        self._serial += 1
        return Content(Junk(self._serial))


class JobHook(enum.Enum):
    """The hook by which a job reached a tier."""

    LOOKUP = "lookup"
    STORE = "submit_store"
    LOAD = "submit_load"


class Answer(enum.Enum):
    """How a tier answers a job."""

    OK = "ok"
    """Honestly: keys it does not hold are missing."""
    MISSING = "missing"
    """The chosen keys are reported as absent, and were not moved. A lookup says nothing of them."""
    FAILED = "failed"
    """The chosen keys are reported as failed, and were not moved or looked up."""
    ERROR = "error"
    """An error without a list of keys: nothing was moved."""
    CORRUPT = "corrupt"
    """Reported as moved, but the bytes of the chosen keys are wrong."""
    LIE = "lie"
    """Reported as done, but nothing was; a lookup's truth is turned round."""


LOOKUP_ANSWERS = (
    Answer.OK,
    Answer.MISSING,
    Answer.LIE,
    Answer.FAILED,
    Answer.ERROR,
)
MOVE_ANSWERS = (
    Answer.OK,
    Answer.MISSING,
    Answer.FAILED,
    Answer.ERROR,
    Answer.CORRUPT,
    Answer.LIE,
)


@dataclass(slots=True)
class RunningJob:
    """A job that a tier has and has not answered. ``epoch`` is the cache epoch in which it was submitted."""

    hook: JobHook
    tier: str
    job: TierJob
    epoch: int
    is_cancelled: bool = False
    """The core has told the tier that nobody waits for it."""
    is_stale: bool = False
    """A reset came after it."""
    arrived: set[OffloadKey] = field(default_factory=set)
    """Of a load: keys that the tier said have come, and whose rows were found right."""

    def rows_by_key(self) -> Iterator[tuple[OffloadKey, int]]:
        """Each key with its row."""
        return zip(self.job.keys, self.job.rows, strict=True)


@dataclass(frozen=True, slots=True)
class DeviceTransfer:
    """A device transfer under way, and what its rows held when it began (a load) or will hold (a store)."""

    request: str
    prepared: PreparedTransfer
    contents: Sequence[Content]
    is_store: bool


@dataclass(frozen=True, kw_only=True)
class TierScript:
    """What a simulated tier is. ``obeys_reset=False`` keeps serving what it held before a reset."""

    name: str
    resident: bool = False
    """The core sees the tier's set of keys without asking."""
    remembers: int = 1_000_000
    """Blocks up to which the resident set is kept; a tier that holds more is asked."""
    obeys_reset: bool = True
    limits: TierLimits = GENEROUS
    pool_limits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``PoolLimits`` that the world of this tier has."""
    store_threshold: int = 1

    @classmethod
    def limited(cls, name: str, **changes: float) -> Self:
        """A tier with generous limits but for *changes*, by name of the field of ``TierLimits`` or ``PoolLimits``."""
        own = {field: value for field, value in changes.items() if field in TierLimits.model_fields}
        of_pool = {field: value for field, value in changes.items() if field not in own}
        limits = TierLimits.model_validate({**GENEROUS.model_dump(), **own})
        return cls(name=name, limits=limits, pool_limits=of_pool)


class ScriptedTier:
    """One tier's contents, and what its answers do to them and to the pool's rows."""

    def __init__(self, script: TierScript, rows: list[Content], new_junk: JunkSource) -> None:
        self.script = script
        self.info = TierInfo(medium="memory")
        self.contents: dict[OffloadKey, Content] = {}
        self.epoch = 0
        self._rows = rows
        self._new_junk = new_junk

    @property
    def complete(self) -> bool:
        """Whether the core still sees all of the tier's keys (``ResidentPresence``)."""
        return len(self.contents) <= self.script.remembers

    def contains_many(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """The resident presence set (``ResidentPresence``): what is really there."""
        return [key in self.contents for key in keys]

    def serve(self, epoch: int) -> None:
        """Go over to another epoch's namespace; one that obeys serves nothing of earlier ones."""
        if self.script.obeys_reset and epoch != self.epoch:
            self.contents.clear()
        self.epoch = epoch

    def perform(self, running: RunningJob, answer: Answer, chosen: Collection[OffloadKey]) -> JobResult:
        """Do what *running* asks for in the way of *answer*, and say so. *chosen* are the keys that go wrong."""
        job = running.job
        if running.hook is JobHook.LOOKUP:
            return self._answer_lookup(job, answer, chosen)
        spoilt = set(job.keys) if answer in (Answer.ERROR, Answer.LIE) else set(chosen)
        if answer is Answer.OK:
            spoilt = set()
        if running.hook is JobHook.STORE:
            absent = self._store(running, answer, spoilt)
        else:
            absent = self._load(running, answer, spoilt)
        match answer:
            case Answer.ERROR:
                return JobResult(job_id=job.id, error="scripted to fail")
            case Answer.FAILED:
                failed = [key for key in job.keys if key in spoilt]
                return JobResult(job_id=job.id, missing=absent, failed=failed)
            case Answer.MISSING:
                return JobResult(
                    job_id=job.id, missing=[key for key in job.keys if key in {*absent, *spoilt}]
                )
            case _:
                return JobResult(job_id=job.id, missing=absent)

    def _answer_lookup(self, job: TierJob, answer: Answer, chosen: Collection[OffloadKey]) -> JobResult:
        truth = self.contains_many(job.keys)
        told: list[bool | None] = [*truth]
        if job.is_prefix and False in truth:
            end = truth.index(False) + 1
            told[end:] = [None] * (len(told) - end)
        if answer in (Answer.FAILED, Answer.MISSING):
            told = [None if key in chosen else there for key, there in zip(job.keys, told, strict=True)]
            failed = [key for key in job.keys if answer is Answer.FAILED and key in chosen]
            return JobResult(job_id=job.id, present=told, failed=failed)
        if answer is Answer.ERROR:
            return JobResult(job_id=job.id, error="scripted to fail")
        present = [not there for there in truth] if answer is Answer.LIE else told
        return JobResult(job_id=job.id, present=present)

    def _store(self, running: RunningJob, answer: Answer, spoilt: Collection[OffloadKey]) -> list[OffloadKey]:
        """Take the rows as they are *now*; a store of an earlier epoch stays where nobody looks."""
        hidden = self.script.obeys_reset and running.epoch != self.epoch
        for key, row in running.rows_by_key():
            if hidden or (key in spoilt and answer is not Answer.CORRUPT):
                continue
            self.contents[key] = self._new_junk() if key in spoilt else self._rows[row]
        return []

    def _load(self, running: RunningJob, answer: Answer, spoilt: Collection[OffloadKey]) -> list[OffloadKey]:
        """Fill the rows; a fault may leave half a block in one. Returns the keys that are not there."""
        absent: list[OffloadKey] = []
        for key, row in running.rows_by_key():
            content = self.contents.get(key)
            if answer is Answer.LIE or key in running.arrived:
                continue
            if key in spoilt:
                self._rows[row] = self._new_junk()
            elif content is None:
                absent.append(key)
            else:
                self._rows[row] = content
        return absent
