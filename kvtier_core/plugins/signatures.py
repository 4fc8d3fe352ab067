"""Whether a plugin's function has exactly the arguments the core will call it with (contract C51).

Decides from signatures alone; calls nothing. A function passes when it has the same argument names as the spec, no
defaults, no ``*args``/``**kwargs``, and is a plain function: a coroutine or generator function returns at once
without having done anything, which the core could not tell from success.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def arguments_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a plain function, without its first one (``self``)."""
    return list(inspect.signature(function).parameters.values())[1:]


def expected_signature(name: str, spec: Callable[..., Any]) -> str:
    """How the function should begin: ``lookup(self, job)``."""
    return f"{name}({', '.join(['self', *(item.name for item in arguments_of(spec))])})"


def unwrap(cls: type, name: str) -> tuple[Callable[..., Any] | None, bool]:
    """The function behind ``cls.name`` and whether it is called with ``self`` (or ``cls``) in front.

    ``None`` when the attribute is no function at all.
    """
    attribute = inspect.getattr_static(cls, name, None)
    if isinstance(attribute, staticmethod):
        return attribute.__func__, False
    if isinstance(attribute, classmethod):
        return attribute.__func__, True
    return (attribute, True) if inspect.isroutine(attribute) else (None, False)


def signature_problems(cls: type, name: str, spec: Callable[..., Any]) -> Iterator[str]:
    """What is wrong with ``cls.name`` as an implementation of *spec*; nothing when it fits."""
    function, bound = unwrap(cls, name)
    if function is None:
        yield "is not a function"
        return
    kind = _not_plain(function)
    if kind is not None:
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
    yield from _argument_problems(parameters[1:] if bound else parameters, spec)


def _not_plain(function: Callable[..., Any]) -> str | None:
    if inspect.iscoroutinefunction(function):
        return "a coroutine function"
    if inspect.isasyncgenfunction(function):
        return "an asynchronous generator function"
    if inspect.isgeneratorfunction(function):
        return "a generator function"
    return None


def _argument_problems(parameters: list[inspect.Parameter], spec: Callable[..., Any]) -> Iterator[str]:
    wanted = [item.name for item in arguments_of(spec)]
    for item in parameters:
        if item.kind in _VARIADIC:
            stars = "*" if item.kind is inspect.Parameter.VAR_POSITIONAL else "**"
            yield f"takes {stars}{item.name}; name the arguments instead"
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
