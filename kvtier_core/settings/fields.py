"""Questions about a settings model's fields, answered from annotations alone."""

import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

from kvtier_core.masking import (
    MASK,
    holds_only_secrets,
    leaves,
    mask_value,
    secrets_in_options,
    secrets_in_text,
)
from kvtier_core.units import parse_duration, parse_size

SettingPath = tuple[str, ...]

_UNKNOWN_MIN = 6
"""Shorter values of unknown settings would mask ordinary words in other messages."""
_UNITS: Mapping[object, str] = {parse_size: "bytes", parse_duration: "seconds"}


def _parts(annotation: object) -> Iterator[object]:
    """*annotation* and everything it is made of, ``Annotated`` metadata left out."""
    yield annotation
    arguments = typing.get_args(annotation)
    for part in arguments[:1] if typing.get_origin(annotation) is typing.Annotated else arguments:
        yield from _parts(part)


def _alternatives(annotation: object) -> list[object]:
    """The branches of a union (one when it is none), ``None`` and ``Annotated`` taken away."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        branches = (item for part in typing.get_args(annotation) for item in _alternatives(part))
        return [item for item in branches if item is not type(None)]
    return [annotation]


def _is_model(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def nested_model(annotation: object) -> type[BaseModel] | None:
    """The settings table a field is, or ``None`` when it is a plain value."""
    first, *others = _alternatives(annotation)
    return first if _is_model(first) and not others else None


def wants_json(annotation: object) -> bool:
    """Whether a text for this field can only be meant as JSON: it holds a list, a table, and no plain text."""
    kinds = [typing.get_origin(item) or item for item in _alternatives(annotation)]
    return not {str, Any} & set(kinds) and any(
        isinstance(kind, type) and issubclass(kind, BaseModel | Iterable) and not issubclass(kind, bytes)
        for kind in kinds
    )


def unit_of(field: FieldInfo) -> str | None:
    """``"bytes"`` for a ``Size``, ``"seconds"`` for a ``Duration``, ``None`` for anything else."""
    metadata = [*field.metadata]
    for part in _parts(field.annotation):
        if typing.get_origin(part) is typing.Annotated:
            metadata += typing.get_args(part)[1:]
    units = (_UNITS.get(getattr(item, "func", None)) for item in metadata)
    return next((unit for unit in units if unit is not None), None)


def field_paths(model: type[BaseModel], prefix: SettingPath) -> Iterator[tuple[SettingPath, object]]:
    """The path and the annotation of every value that *model* takes, tables inside it opened."""
    for name, field in model.model_fields.items():
        inner = nested_model(field.annotation)
        if inner is None:
            yield (*prefix, name), field.annotation
        else:
            yield from field_paths(inner, (*prefix, name))


def values_in(model: BaseModel, prefix: SettingPath) -> Iterator[tuple[SettingPath, object, str | None]]:
    """Every value of *model*, tables opened: where it is, the value with secrets masked, its unit."""
    for name, field in type(model).model_fields.items():
        value, path = getattr(model, name), (*prefix, name)
        if isinstance(value, BaseModel):
            yield from values_in(value, path)
        elif isinstance(value, Mapping) and value:
            for key, item in value.items():
                shown = MASK if holds_only_secrets(name) else mask_value(str(key), item)
                yield (*path, str(key)), shown, None
        else:
            yield path, mask_value(name, value), unit_of(field)


def find_secrets(model: type[BaseModel] | None, table: Mapping[str, Any]) -> set[str]:
    """Every string of *table* that must never be shown; values under unknown names count as secrets."""
    found: set[str] = set()
    for name, value in table.items():
        field = model.model_fields.get(name) if model is not None else None
        if field is None:
            found |= {leaf for leaf in leaves(value) if len(leaf) >= _UNKNOWN_MIN}
        elif holds_only_secrets(name):
            found |= secrets_in_options({name: value})
        elif {SecretStr, SecretBytes} & set(_parts(field.annotation)):
            found |= set(leaves(value))
        else:
            found |= _search(value, [part for part in _parts(field.annotation) if _is_model(part)])
    return found


def _search(value: object, models: Sequence[type[BaseModel]]) -> set[str]:
    """The secrets in a value whose type may be, or hold, any of *models*."""
    found: set[str] = set()
    if isinstance(value, Mapping):
        for model in models:
            found |= find_secrets(model, value)
        for name, item in value.items():
            is_secret = holds_only_secrets(str(name))
            found |= secrets_in_options({name: item}) if is_secret else _search(item, ())
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            found |= _search(item, models)
    else:
        for text in leaves(value):
            found |= secrets_in_text(text)
    return found
