"""What the variables ``KVTIER_...`` mean, once the types of all tiers are known.

Decides which variables are settings, which are mistakes, and which texts are JSON (lists and tables, C53). Unknown
variables are found here by going through all of them, since nobody else would notice one that sets nothing.
"""

import json
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from kvtier_core.settings.fields import field_paths, nested_model, wants_json
from kvtier_core.settings.layers import KNOWN_VARIABLES, Merged, SettingPath, Variable, variable_for
from kvtier_core.settings.model import PoolSettings, TopSettings
from kvtier_core.settings.problems import Problems
from kvtier_core.suggest import did_you_mean

TierModels = Mapping[str, type[BaseModel] | None]
"""The settings model of each configured tier; ``None`` where its type could not be loaded."""


def put_variables(
    variables: tuple[Variable, ...], models: TierModels, merged: Merged, problems: Problems
) -> None:
    """Put every variable that is a setting into *merged*, and note every one that isn't."""
    known = sorted({*KNOWN_VARIABLES, *(variable_for(path) for path in _all_paths(models))})
    for variable in variables:
        if _tier_without_model(variable.path, models):
            continue  # what is wrong there is already known, and its settings can't be
        place = _find(variable.path, models) if variable.name == variable_for(variable.path) else None
        if place is None:
            problems.add(variable.name, f"unknown environment variable{_hint(variable.name.upper(), known)}")
        elif isinstance(place, _Inside):
            problems.add(
                variable.name, f"unknown environment variable; set {place.variable} to a JSON object"
            )
        else:
            _put(variable, place.annotation, merged, problems)


def _hint(name: str, known: list[str]) -> str:
    inside = [item for item in known if item.startswith(f"{name}__")]
    return f"; it names a table: set its values, such as {inside[0]}" if inside else did_you_mean(name, known)


class _Found:
    def __init__(self, annotation: object) -> None:
        self.annotation = annotation


class _Inside:
    """The path goes on inside a value that is no settings table."""

    def __init__(self, variable: str) -> None:
        self.variable = variable


def _put(variable: Variable, annotation: object, merged: Merged, problems: Problems) -> None:
    text = variable.text
    value: object = text
    if wants_json(annotation):
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            problems.add(
                variable.name, """expected JSON, such as ["a", "b"] for a list or {"name": "value"}"""
            )
            return
    merged.put(variable.path, value, variable.source)


def _tier_without_model(path: SettingPath, models: TierModels) -> bool:
    return len(path) > 1 and path[0] == "tiers" and path[1] in models and models[path[1]] is None


def _find(path: SettingPath, models: TierModels) -> _Found | _Inside | None:
    if path[0] == "pool":
        return _walk(PoolSettings, path, 1)
    if path[0] == "tiers" and len(path) > 1:
        model = models.get(path[1])
        return None if model is None else _walk(model, path, 2)
    return _walk(TopSettings, path, 0)


def _walk(model: type[BaseModel], path: SettingPath, start: int) -> _Found | _Inside | None:
    field = model.model_fields.get(path[start]) if start < len(path) else None
    if field is None:
        return None
    inner = nested_model(field.annotation)
    if inner is not None:
        return _walk(inner, path, start + 1)
    if start + 1 == len(path):
        return _Found(field.annotation)
    return _Inside(variable_for(path[: start + 1])) if wants_json(field.annotation) else None


def _all_paths(models: TierModels) -> Iterator[SettingPath]:
    yield from field_paths(TopSettings, ())
    yield from field_paths(PoolSettings, ("pool",))
    for name, model in models.items():
        if model is not None:
            yield from field_paths(model, ("tiers", name))
