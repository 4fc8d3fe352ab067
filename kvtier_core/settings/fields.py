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


def find_secrets(models: Sequence[type[BaseModel]], value: object) -> set[str]:
    """Every string of *value*, a table that may be any of *models* or hold one, that must never be shown.

    Values under names that none of them knows count as secrets.
    """
    if isinstance(value, list | tuple | set | frozenset):
        return set().union(*(find_secrets(models, item) for item in value))
    if not isinstance(value, Mapping):
        return set().union(*map(secrets_in_text, leaves(value)))
    found: set[str] = set()
    for name, item in value.items():
        annotations = [model.model_fields[name].annotation for model in models if name in model.model_fields]
        parts = [part for annotation in annotations for part in _parts(annotation)]
        if holds_only_secrets(str(name)):
            found |= secrets_in_options({name: item})
        elif models and not annotations:
            found |= {leaf for leaf in leaves(item) if len(leaf) >= _UNKNOWN_MIN}
        elif {SecretStr, SecretBytes} & set(parts):
            found |= set(leaves(item))
        else:
            found |= find_secrets([part for part in parts if _is_model(part)], item)
    return found
