"""What the variables ``KVTIER_...`` mean, once the types of all tiers are known.

Decides which variables are settings, which are mistakes, and which texts are JSON (lists and tables, C53). An unknown
variable is a mistake that nothing else would notice, since it sets nothing.
"""

import json
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from kvtier_core.settings.fields import SettingPath, field_paths, wants_json
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
    settings = {
        variable_for(path): annotation
        for at, model in _sections(models)
        for path, annotation in field_paths(model, at)
    }
    known = sorted({*KNOWN_VARIABLES, *settings})
    for variable in variables:
        path = variable.path
        if len(path) > 1 and path[0] == "tiers" and models.get(path[1], BaseModel) is None:
            continue  # what is wrong there is already known, and its settings can't be
        if variable.name in settings:
            _put(variable, settings[variable.name], merged, problems)
        elif (whole := _whole(variable, settings)) is not None:
            problems.add(variable.name, f"unknown environment variable; set {whole} to a JSON object")
        else:
            problems.add(variable.name, f"unknown environment variable{_hint(variable.name.upper(), known)}")


def _sections(models: TierModels) -> Iterator[tuple[SettingPath, type[BaseModel]]]:
    """Every table of settings: where it is, and its model."""
    yield (), TopSettings
    yield ("pool",), PoolSettings
    for name, model in models.items():
        if model is not None:
            yield ("tiers", name), model


def _whole(variable: Variable, settings: Mapping[str, object]) -> str | None:
    """The variable of the setting that *variable* names a part of, where that is set as JSON."""
    if variable.name != variable_for(variable.path):
        return None
    names = (variable_for(variable.path[:length]) for length in range(1, len(variable.path)))
    return next((name for name in names if name in settings and wants_json(settings[name])), None)


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
