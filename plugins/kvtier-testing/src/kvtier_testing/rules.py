"""What a rule of the kit says when a tier breaks it: what happened, the rule in plain words, and what to do."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import ParamSpec

_P = ParamSpec("_P")
_NUMBER = re.compile(r"_(c\d+b?)(?=_)")
_MAX_TEXT = 300
"""Characters of a tier's own words that a message repeats: an exception may quote a whole block."""


def rule(test: Callable[_P, None]) -> Callable[_P, None]:
    """Make a test of a rule: the first paragraph of its docstring is the rule, the second says what to do.

    The rule's number in docs/contract.md is part of the test's name.
    """

    @functools.wraps(test)
    def tried(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            test(*args, **kwargs)
        except Exception as error:
            raise AssertionError(_explain(test.__name__, inspect.getdoc(test) or "", error)) from error

    return tried


def _explain(name: str, doc: str, error: Exception) -> str:
    text = str(error) if isinstance(error, AssertionError) else f"the tier raised {told(error)}"
    numbers = ", ".join(number.upper() for number in _NUMBER.findall(name))
    words, _, advice = doc.partition("\n\n")
    return f"{text}\n  Rule {numbers}: {_flat(words)}\n  What to do: {_flat(advice)}"


def told(error: BaseException) -> str:
    """An exception in a few words."""
    text = str(error)
    return f"{type(error).__name__}: {text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + '...'}"


def _flat(text: str) -> str:
    return " ".join(text.split())
