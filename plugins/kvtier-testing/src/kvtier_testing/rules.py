"""What a rule of the kit says when a tier breaks it: what happened, the rule in plain words, and what to do."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import ParamSpec

from kvtier_testing.calling import HangError
from kvtier_testing.raised import forget_raised, told, where_raised

_P = ParamSpec("_P")
_NUMBER = re.compile(r"_(c\d+b?)(?=_)")


def rule(test: Callable[_P, None]) -> Callable[_P, None]:
    """Make a test of a rule: the first paragraph of its docstring is the rule, the second says what to do.

    The rule's number in docs/contract.md is part of the test's name.
    """

    @functools.wraps(test)
    def tried(*args: _P.args, **kwargs: _P.kwargs) -> None:
        forget_raised()
        try:
            test(*args, **kwargs)
        except Exception as error:
            raise AssertionError(_explain(test.__name__, inspect.getdoc(test) or "", error)) from error

    return tried


def _explain(name: str, doc: str, error: Exception) -> str:
    text = str(error) if isinstance(error, AssertionError) else f"the tier raised {told(error)}"
    if isinstance(error, HangError):
        return f"{text}\n  {error.rule}\n  What to do: {error.advice}"
    numbers = ", ".join(number.upper() for number in _NUMBER.findall(name))
    words, _, advice = map(_flat, doc.partition("\n\n"))
    if (where := where_raised(text)) is not None:
        text += f"\n  Raised by the tier in {where}"
        advice = f"See why that line raises. If this rule's own case raises there: {advice}"
    return f"{text}\n  Rule {numbers}: {words}\n  What to do: {advice}"


def _flat(text: str) -> str:
    return " ".join(text.split())
