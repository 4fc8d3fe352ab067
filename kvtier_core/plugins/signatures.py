"""Whether a plugin's function has exactly the arguments the core will call it with (contract C51).

Decides from signatures alone; calls nothing. A function passes when it has the same argument names as the spec, no
defaults, no ``*args``/``**kwargs``, and is a plain function: a coroutine or generator function returns at once
without having done anything, which the core could not tell from success.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

_Function = Callable[..., Any]
_NOT_PLAIN = {
    "a coroutine function": inspect.iscoroutinefunction,
    "an asynchronous generator function": inspect.isasyncgenfunction,
    "a generator function": inspect.isgeneratorfunction,
}
_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def _arguments(spec: _Function) -> list[str]:
    return list(inspect.signature(spec).parameters)[1:]  # without self


def expected_signature(name: str, spec: _Function) -> str:
    """How the function should begin: ``lookup(self, job)``."""
    return f"{name}({', '.join(['self', *_arguments(spec)])})"


def unwrap(cls: type, name: str) -> tuple[_Function | None, bool]:
    """The function behind ``cls.name``, if it is one, and whether ``self`` or ``cls`` is passed in front."""
    attribute = inspect.getattr_static(cls, name, None)
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__, isinstance(attribute, classmethod)
    return (attribute, True) if inspect.isroutine(attribute) else (None, False)


def method_problems(
    cls: type, name: str, spec: _Function, role: str | None = None, *, may_yield: bool = False
) -> Iterator[str]:
    """What is wrong with ``cls.name`` as an implementation of *spec*; messages call it *role* (else *name*)."""
    role = role or name
    function, bound = unwrap(cls, name)
    problems = ["is not a function"] if function is None else _problems(function, bound, spec, may_yield)
    for problem in problems:
        yield f"{role} {problem}; expected {expected_signature(role, spec)}"


def _problems(function: _Function, bound: bool, spec: _Function, may_yield: bool) -> Iterator[str]:  # noqa: FBT001
    for kind, is_kind in _NOT_PLAIN.items():
        if is_kind(function) and not (may_yield and is_kind is inspect.isgeneratorfunction):
            yield f"is {kind}; it must be a plain function (start threads of your own for slow work)"
            return
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        yield f"has no readable signature ({error})"
        return
    if bound and not parameters:
        yield "takes no 'self'"
        return
    yield from _argument_problems(parameters[1:] if bound else parameters, _arguments(spec))


def _argument_problems(parameters: list[inspect.Parameter], wanted: list[str]) -> Iterator[str]:
    for item in parameters:
        if item.kind in _STARS:
            yield f"takes {_STARS[item.kind]}{item.name}; name the arguments instead"
        elif item.name not in wanted:
            yield f"has the surplus argument {item.name!r}"
        elif item.default is not inspect.Parameter.empty:
            yield f"gives {item.name!r} a default; the core always passes it"
        elif item.kind is inspect.Parameter.KEYWORD_ONLY:
            yield f"takes {item.name!r} by keyword only; the core passes it by position"
    names = [item.name for item in parameters]
    for name in wanted:
        if name not in names:
            yield f"lacks the argument {name!r}"
    if sorted(names) == sorted(wanted) and names != wanted:
        yield f"has its arguments in another order ({', '.join(names)})"
