"""Turns what a tier's hooks answer into plain values, on the tier's own hook thread.

A tier's objects may compute, raise or sleep when looked at, and say something else each time. So only this module
looks at them, once at each attribute. It hands out exact ``int``, ``bytes``, ``bool``, ``str`` and tuples of them, or
raises an error that says what was wrong.
"""

from collections.abc import Iterable
from itertools import islice

from kvtier_core.keys import OffloadKey
from kvtier_core.values import JobResult, TierJob


def read_results(answer: Iterable[object] | None, results: list[object], limit: int) -> None:
    """Add what ``get_finished_jobs`` returned to *results*, at most *limit* of it: its end may never come.

    Raises whatever looking at it raises; what was read before is added all the same.
    """
    if answer is not None:
        results.extend(islice(answer, limit))


def job_id_of(result: object) -> int | None:
    """The job that *result* is for; ``None`` when it is no result at all."""
    if not isinstance(result, JobResult):
        return None
    job_id: object = result.job_id
    return job_id if type(job_id) is int else None


def plain_result(result: JobResult, job: TierJob) -> JobResult:
    """*result* of *job* with nothing of the tier's in it.

    Raises what looking at it raises, and ``ValueError`` for one that does not fit the job.
    """
    error: object = result.error
    if error is not None and type(error) is not str:
        raise TypeError(f"error must be a string, not {type(error).__name__}")
    present: object = result.present
    plain = JobResult(
        job_id=job.id,
        present=None if present is None else _answers(present),
        missing=plain_keys("missing", result.missing),
        failed=plain_keys("failed", result.failed),
        error=error,
        held=plain_keys("held", result.held),
    )
    _check_fits(plain, job)
    return plain


def _check_fits(plain: JobResult, job: TierJob) -> None:
    strange = {*plain.missing, *plain.failed, *plain.held}.difference(job.keys)
    if strange:
        raise ValueError(f"it names {len(strange)} keys that its job does not have")
    is_answered = plain.present is not None or (plain.error is None and not plain.failed)
    if not job.rows and is_answered and len(plain.present or ()) != len(job.keys):
        raise ValueError(
            f"present must have an answer for each of {len(job.keys)} keys, not {len(plain.present or ())}"
        )


def _answers(present: object) -> tuple[bool | None, ...]:
    if not isinstance(present, list | tuple):
        raise TypeError(f"present must be a list or tuple of bools, not {type(present).__name__}")
    answers = tuple(present)
    for answer in answers:
        if answer is not None and type(answer) is not bool:
            raise TypeError(
                f"present must hold bools, or None for what is not known, not {type(answer).__name__}"
            )
    return answers


def plain_keys(name: str, keys: object) -> tuple[OffloadKey, ...]:
    """*keys*, which a tier calls *name*, with nothing of the tier's in it. Raises ``TypeError``."""
    if not isinstance(keys, list | tuple | set | frozenset):
        raise TypeError(f"{name} must be a list, tuple or set of keys, not {type(keys).__name__}")
    plain = tuple(keys)
    for key in plain:
        if type(key) is not bytes:
            raise TypeError(f"{name} must hold keys (bytes), not {type(key).__name__}")
    return plain
