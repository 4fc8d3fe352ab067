"""What the variables ``KVTIER_...`` mean, once the types of all tiers are known.

Decides which variables are settings, which are mistakes, and which texts are JSON (lists and tables, C53). An unknown
variable is a mistake that nothing else would notice, since it sets nothing.
"""

import json
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from kvtier_core.settings.fields import SettingPath, field_paths, nested_model, wants_json
from kvtier_core.settings.layers import KNOWN_VARIABLES, Merged, Variable, variable_for
from kvtier_core.settings.model import PoolSettings, TopSettings
from kvtier_core.settings.problems import Problems
from kvtier_core.suggest import did_you_mean

TierModels = Mapping[str, type[BaseModel] | None]
"""The settings model of each configured tier; ``None`` where its type could not be loaded."""


def put_variables(
    variables: tuple[Variable, ...], models: TierModels, merged: Merged, problems: Problems
) -> None:
    """Put every variable that is a setting into *merged*, and note every one that isn't."""
    sections = dict(_sections(models))
    known = sorted(
        {*KNOWN_VARIABLES}
        | {variable_for(path) for at, model in sections.items() for path in field_paths(model, at)}
    )
    for variable in variables:
        path = variable.path
        if len(path) > 1 and path[0] == "tiers" and models.get(path[1], BaseModel) is None:
            continue  # what is wrong there is already known, and its settings can't be
        found = _find(path, sections) if variable.name == variable_for(path) else None
        if found is None:
            problems.add(variable.name, f"unknown environment variable{_hint(variable.name.upper(), known)}")
        elif len(found[0]) < len(path):
            whole = variable_for(found[0])
            problems.add(variable.name, f"unknown environment variable; set {whole} to a JSON object")
        else:
            _put(variable, found[1], merged, problems)


def _sections(models: TierModels) -> Iterator[tuple[SettingPath, type[BaseModel]]]:
    """Every table of settings: where it is, and its model."""
    yield (), TopSettings
    yield ("pool",), PoolSettings
    for name, model in models.items():
        if model is not None:
            yield ("tiers", name), model


def _find(
    path: SettingPath, sections: Mapping[SettingPath, type[BaseModel]]
) -> tuple[SettingPath, object] | None:
    """The setting that *path* names, or goes into: where it is, and its annotation."""
    place = next(at for at in (path[:2], path[:1], ()) if at in sections)
    model: type[BaseModel] | None = sections[place]
    annotation: object = None
    while model is not None:
        field = model.model_fields.get(path[len(place)]) if len(place) < len(path) else None
        if field is None:
            return None
        place, annotation = path[: len(place) + 1], field.annotation
        model = nested_model(annotation)
    return (place, annotation) if place == path or wants_json(annotation) else None


def _hint(name: str, known: list[str]) -> str:
    inside = [item for item in known if item.startswith(f"{name}__")]
    return f"; it names a table: set its values, such as {inside[0]}" if inside else did_you_mean(name, known)


def _put(variable: Variable, annotation: object, merged: Merged, problems: Problems) -> None:
    value: object = variable.text
    if wants_json(annotation):
        try:
            value = json.loads(variable.text)
        except json.JSONDecodeError:
            problems.add(
                variable.name, """expected JSON, such as ["a", "b"] for a list or {"name": "value"}"""
            )
            return
    merged.put(variable.path, value, f"env:{variable.name}")
