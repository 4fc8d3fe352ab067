"""Whether a class is a tier type that this core can run, decided when it is loaded and not at the first request (C51).

Two kinds are accepted: subclasses of ``BlockTier``, and classes that implement the hook specs. Every problem of a
class is found in one go. Nothing is instantiated or called. A function passes when it has exactly the argument names
that the core calls it with, no defaults, no ``*args`` or ``**kwargs``, and is a plain function: a coroutine or
generator function returns at once without having done anything, which the core could not tell from success.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from kvtier_core.blocktier import (
    BlockTier,
    SupportsBatch,
    SupportsChains,
    SupportsFollow,
    SupportsHolds,
    SupportsMarks,
    SupportsRemoval,
    SupportsScan,
    SupportsTouch,
)
from kvtier_core.errors import PluginError
from kvtier_core.hookspecs import PROJECT, REQUIRED_HOOKS, TIER_GROUP, TierHookSpecs
from kvtier_core.suggest import did_you_mean, nearest
from kvtier_core.tier_settings import Threads, TierSettings
from kvtier_core.values import TierInfo

_HOOKS = {name: spec for name, spec in vars(TierHookSpecs).items() if hasattr(spec, f"{PROJECT}_spec")}
_REQUIRED_METHODS = ("open", "contains", "store", "load", "delete", "close")
_BATCH_METHODS = ("store_many", "load_many")
_OPTIONAL_METHODS = {
    "store_many": SupportsBatch,
    "load_many": SupportsBatch,
    "remove_namespace": SupportsRemoval,
    "follow": SupportsFollow,
    "holds": SupportsHolds,
    "touch": SupportsTouch,
    "arrange": SupportsChains,
    "mark_used": SupportsMarks,
    "scan": SupportsScan,
}
_Function = Callable[..., Any]
_NOT_PLAIN = {
    "a coroutine function": inspect.iscoroutinefunction,
    "an asynchronous generator function": inspect.isasyncgenfunction,
    "a generator function": inspect.isgeneratorfunction,
}
_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_NEARLY = 0.8
"""How alike two names are, of 1, before one counts as the other misspelt."""
_SETTING_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def check_tier_class(cls: object, origin: str | None = None) -> None:
    """Raise ``PluginError`` naming everything that is wrong with *cls* as a tier type, or return.

    *origin* names the plugin in the message: distribution and version, or the class's module when not given.
    """
    if not isinstance(cls, type):
        raise PluginError(f"{origin or 'the tier type'}: the entry point's target is {cls!r}, not a class")
    problems = list(_problems(cls))
    if problems:
        where = f"{origin}: {cls.__qualname__}" if origin else f"{cls.__module__}.{cls.__qualname__}"
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise PluginError(f"{where} is not a tier type of {TIER_GROUP}:{lines}")


def _problems(cls: type) -> Iterator[str]:
    yield from _settings_problems(cls)
    yield from _info_problems(cls)
    try:
        inspect.signature(cls).bind("settings", "context")
    except (TypeError, ValueError) as error:
        yield f"can't be built as cls(settings, context): {error}"
    if issubclass(cls, BlockTier):
        yield from _block_tier_problems(cls)
    elif own := _blocking_methods(cls):
        yield (
            f"has {', '.join(own)}, as tiers on the blocking interface do, but no hook, and does not subclass "
            f"BlockTier: begin it with class {cls.__name__}(kvtier_core.tier.BlockTier)"
        )
    else:
        yield from _hook_problems(cls)


def _blocking_methods(cls: type) -> list[str]:
    """The methods of the blocking interface that a class without any hook has."""
    if any(name in _HOOKS or _mark(cls, name) is not None for name in dir(cls)):
        return []
    return [name for name in (*_REQUIRED_METHODS, *_BATCH_METHODS) if unwrap(cls, name)[0] is not None]


def _settings_problems(cls: type) -> Iterator[str]:
    settings = getattr(cls, "Settings", None)
    if not isinstance(settings, type) or not issubclass(settings, TierSettings):
        yield "Settings must be a subclass of kvtier_core.tier.TierSettings"
        return
    yield from _redefinitions(settings)
    for key in ("extra", "frozen"):
        if settings.model_config.get(key) != TierSettings.model_config.get(key):
            yield f"Settings.model_config changes {key!r}: leave it as TierSettings has it"
    for name, field in settings.model_fields.items():
        if not _SETTING_NAME.fullmatch(name):
            yield f"Settings.{name}: a setting's name is lower case with single underscores"
        if field.alias is not None or field.validation_alias is not None:
            yield f"Settings.{name} has an alias: settings are called by their field's name"


def _redefinitions(settings: type[TierSettings]) -> Iterator[str]:
    for base in settings.__mro__[: settings.__mro__.index(TierSettings)]:
        for name in sorted(set(inspect.get_annotations(base)) & set(TierSettings.model_fields)):
            if name != "threads":
                yield f"Settings redefines {name!r}, a setting of the core: remove or rename it"
            elif not _has_other_default(settings.model_fields[name], TierSettings.model_fields[name]):
                yield "Settings redefines 'threads': only its default may be another, as in threads: Threads = 1"


def _has_other_default(field: FieldInfo, core: FieldInfo) -> bool:
    """Whether *field* is the core's but for its default, and that is one which the core allows."""
    is_same = (field.annotation, field.metadata) == (core.annotation, core.metadata)
    try:
        return is_same and bool(TypeAdapter(Threads).validate_python(field.default))
    except ValidationError:
        return False


def _info_problems(cls: type) -> Iterator[str]:
    info = getattr(cls, "info", None)
    if not isinstance(info, TierInfo):
        yield "info must be a kvtier_core.tier.TierInfo, such as info = TierInfo(medium='disk')"
        return
    if not info.medium:
        yield "info.medium is empty: say where the blocks are, such as 'disk'"
    yield from _enforcement_problems(info, is_blocking=issubclass(cls, BlockTier))
    if info.reports_contents and issubclass(cls, BlockTier) and not hasattr(cls, "follow"):
        yield "info.reports_contents, but nothing reports: write follow, or leave it out"


def _enforcement_problems(info: TierInfo, *, is_blocking: bool) -> Iterator[str]:
    if info.bounded_by not in ("core", "tier", "storage"):
        yield f"info.bounded_by must be 'core', 'tier' or 'storage', not {info.bounded_by!r}"
    elif info.bounded_by == "core" and not is_blocking:
        yield (
            "info.bounded_by is 'core', but the core can't evict from a tier on the hook specs: set it to 'tier' if "
            "the tier keeps to its capacity, or to 'storage' if its storage has a limit of its own"
        )
    if info.ttl_by not in ("core", "tier"):
        yield f"info.ttl_by must be 'core' or 'tier', not {info.ttl_by!r}"
    elif info.ttl_by == "tier" and info.bounded_by == "core":
        yield "info.ttl_by is 'tier', but the core ends the blocks of a tier that it bounds: leave it out"
    if info.bounded_by == "storage" and info.default_capacity is not None:
        yield "info.default_capacity is set, but the storage's own limit bounds this tier: leave it out"


def _block_tier_problems(cls: type[BlockTier]) -> Iterator[str]:
    own = [name for name in dir(cls) if callable(getattr(cls, name, None)) and not hasattr(BlockTier, name)]
    yield from _misspelt(own, _OPTIONAL_METHODS)
    if not _are_exceptions(cls.transient):
        yield (
            f"transient must be a tuple of exception classes, such as (redis.ConnectionError,), not {cls.transient!r}"
        )
    for name in _REQUIRED_METHODS:
        spec = getattr(BlockTier, name)
        if name in cls.__abstractmethods__:
            near = nearest(name, own)
            hint = f"; is {near!r} meant to be it?" if near else ""
            yield f"{name}: missing{hint}; expected {expected_signature(name, spec)}"
        else:
            yield from method_problems(cls, name, spec)
    for name, protocol in _OPTIONAL_METHODS.items():
        if hasattr(cls, name):
            yield from method_problems(cls, name, getattr(protocol, name), may_yield=name == "scan")
    for there, missing in (_BATCH_METHODS, _BATCH_METHODS[::-1]):
        if hasattr(cls, there) and not hasattr(cls, missing):
            expected = expected_signature(missing, getattr(SupportsBatch, missing))
            yield f"has {there} but not {missing}: both or neither; expected {expected}"
    info = getattr(cls, "info", None)
    needs_scan = isinstance(info, TierInfo) and info.persistent and info.bounded_by == "core"
    if needs_scan and not hasattr(cls, "scan"):
        yield "scan: missing; a persistent tier bounded by the core must enumerate its blocks; expected scan(self)"


def _are_exceptions(found: object) -> bool:
    if not isinstance(found, tuple):
        return False
    return all(isinstance(item, type) and issubclass(item, Exception) for item in found)


def _misspelt(own: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Public methods that are nearly an optional one: nobody would call them, and the ability would be missing."""
    for name in own:
        near = nearest(name, known, _NEARLY) if not name.startswith("_") and name not in known else None
        if near is not None:
            yield (
                f"{name}: the interface has no such method; did you mean {near!r}? Begin the name with an underscore "
                "if it is a method of your own"
            )


def _mark(cls: type, name: str) -> dict[str, Any] | None:
    """The options ``hookimpl`` left on ``cls.name`` itself, ``None`` when it is not marked."""
    options = getattr(unwrap(cls, name)[0], f"{PROJECT}_impl", None)
    return options if isinstance(options, dict) else None


def _hook_problems(cls: type) -> Iterator[str]:
    hooks: set[str] = set()
    for name in dir(cls):
        options = _mark(cls, name)
        if options is None:
            yield from _unmarked_problems(cls, name)
            continue
        hook = str(options.get("specname") or name)
        hooks.add(hook)
        spec = _HOOKS.get(hook)
        if spec is None:
            yield f"{hook}: no such hook in {TIER_GROUP}{did_you_mean(hook, _HOOKS)}"
        elif options.get("wrapper") or options.get("hookwrapper"):
            yield f"{hook} is a wrapper, but there is nothing to wrap: each tier has its hooks to itself"
        else:
            yield from method_problems(cls, name, spec, role=hook)
    for hook in REQUIRED_HOOKS:
        if hook not in hooks and not hasattr(cls, hook):
            yield f"{hook}: missing and required; expected @hookimpl {expected_signature(hook, _HOOKS[hook])}"


def _unmarked_problems(cls: type, name: str) -> Iterator[str]:
    if callable(getattr(cls, name, None)):
        yield from _misspelt([name], _HOOKS)
    for base in cls.__mro__[1:]:
        if name in vars(base) and _mark(base, name) is not None:
            yield f"{name} overrides a hook of {base.__qualname__} but lost its marker: decorate it with @hookimpl"
            return
    if name in _HOOKS:
        expected = expected_signature(name, _HOOKS[name])
        yield f"{name} is named like a hook but has no marker: add @hookimpl or rename it; expected {expected}"


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
    problems = (
        ["is not a function"] if function is None else _function_problems(function, bound, spec, may_yield)
    )
    for problem in problems:
        yield f"{role} {problem}; expected {expected_signature(role, spec)}"


def _function_problems(function: _Function, bound: bool, spec: _Function, may_yield: bool) -> Iterator[str]:  # noqa: FBT001
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
