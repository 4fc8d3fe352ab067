"""The nearest valid name to one that isn't: the ``did you mean`` of every message."""

import difflib
from collections.abc import Iterable


def nearest(name: str, candidates: Iterable[str], *, count: int = 1) -> list[str]:
    """The candidates that *name* may have been meant to be, best first."""
    return difflib.get_close_matches(name, sorted(set(candidates)), n=count, cutoff=0.6)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing when no candidate is near."""
    names = nearest(name, candidates)
    return f"; did you mean {' or '.join(repr(item) for item in names)}?" if names else ""
