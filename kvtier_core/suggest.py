"""The nearest valid name to one that isn't: the ``did you mean`` of every message."""

import difflib
from collections.abc import Iterable


def nearest(name: str, candidates: Iterable[str], alike: float = 0.6) -> str | None:
    """The candidate that *name* may have been meant to be: at least so much *alike*, of 1."""
    return next(iter(difflib.get_close_matches(name, sorted(set(candidates)), n=1, cutoff=alike)), None)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing when no candidate is near."""
    near = nearest(name, candidates)
    return f"; did you mean {near!r}?" if near else ""
