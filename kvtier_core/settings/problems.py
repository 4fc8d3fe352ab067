"""Everything that is wrong with a configuration, collected and told at once, without secrets.

Messages carry names, sources and what to do; of inputs numbers alone. Pydantic's own rendering prints whole inputs, so
its errors are told here in the words of a person who writes TOML.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvtier_core.errors import ConfigError, PluginError
from kvtier_core.masking import mask_text
from kvtier_core.settings.fields import SettingPath, nested_model, unit_of
from kvtier_core.settings.layers import Merged, dotted, variable_for
from kvtier_core.settings.model import TopSettings
from kvtier_core.suggest import did_you_mean

_PREFIXES = ("Value error, ", "Assertion failed, ")
_BOUNDS = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt:g}",
}
_KINDS = {
    "int": ("a whole number", "16"),
    "float": ("a number", "0.5"),
    "bool": ("true or false", None),
    "string": ("a text", '"lru"'),
    "tuple": ("a list", '["a", "b"]'),
    "list": ("a list", '["a", "b"]'),
    "set": ("a list", '["a", "b"]'),
    "frozen_set": ("a list", '["a", "b"]'),
    "dict": ("a table", '{name = "value"}'),
    "model": ("a table", None),
}
"""By how pydantic begins the names of its errors: what a value must be, and an example where there is no default."""
_RIGHT_KINDS = ("string_too_short", "string_too_long", "string_pattern_mismatch")
"""Errors whose names begin so, though the value is of the right kind."""
_MOST_DIGITS = 20


class Problems:
    """A growing list of what is wrong. ``raise_if_any`` ends it."""

    def __init__(self) -> None:
        self._config: list[str] = []
        self._plugins: list[tuple[str, PluginError]] = []
        self._secrets: set[str] = set()

    def hide(self, secrets: set[str]) -> None:
        """Never show these strings, whatever a message says."""
        self._secrets |= secrets

    def add(self, where: str, message: str) -> None:
        """Note one problem of the place *where* (a dotted name or a variable)."""
        problem = f"{where}: {message}"
        if problem not in self._config:
            self._config.append(problem)

    def add_at(self, path: SettingPath, message: str, merged: Merged) -> None:
        """Note one problem of the value at *path*, with where the value came from."""
        source = merged.source_of(path)
        self.add(dotted(path) if source is None else f"{dotted(path)} ({source})", message)

    def add_plugin(self, where: str, error: PluginError) -> None:
        """Note that the tier type named at *where* can't be used."""
        self._plugins.append((where, error))

    def add_validation(
        self, error: ValidationError, prefix: SettingPath, model: type[BaseModel], merged: Merged
    ) -> None:
        """Note each error of validating the table at *prefix* against *model*."""
        for item in error.errors(include_url=False):
            path, owner = _place(item["loc"], prefix, model, merged)
            self.add_at(path, _explain(item, path, owner), merged)

    def raise_if_any(self) -> None:
        """Raise ``PluginError`` when only plugins are at fault, ``ConfigError`` for the rest; or return."""
        texts = [*self._config, *(f"{where}: {error}" for where, error in self._plugins)]
        if self._config:
            raise ConfigError(self._render(texts))
        if self._plugins:
            raise PluginError(self._render(texts)) from self._plugins[0][1]

    def _render(self, texts: Sequence[str]) -> str:
        texts = [mask_text(text, self._secrets) for text in texts]
        if len(texts) == 1:
            return texts[0]
        return "\n  - ".join([f"{len(texts)} problems in the configuration:", *texts])


def _place(
    location: tuple[int | str, ...], prefix: SettingPath, model: type[BaseModel], merged: Merged
) -> tuple[SettingPath, type[BaseModel] | None]:
    """The path an error is about and the model that owns its last name.

    Pydantic mixes tags of union branches and validators into its locations; whatever names neither a field nor
    something the user wrote is left out.
    """
    path = prefix
    data: Any = merged.table(prefix)
    owner: type[BaseModel] | None = model
    inside: type[BaseModel] | None = model
    for part in location:
        field = inside.model_fields.get(str(part)) if inside is not None else None
        written = isinstance(data, Mapping) and part in data
        if field is None and not written and not isinstance(part, int):
            continue
        path = (*path, str(part))
        data = data[part] if written else None
        owner, inside = inside, nested_model(field.annotation) if field is not None else None
    return path, owner


def _explain(item: ErrorDetails, path: SettingPath, owner: type[BaseModel] | None) -> str:
    kind, message = item["type"], item["msg"]
    if wrong_value := _explain_value(item, owner.model_fields.get(path[-1]) if owner is not None else None):
        return wrong_value
    if kind == "missing":
        return f"is required: set it in [{dotted(path[:-1])}] or as {variable_for(path)}"
    if kind == "extra_forbidden":
        names = sorted(owner.model_fields) if owner is not None else []
        if owner is TopSettings:
            names += ["pool", "tiers"]
        elif path[-1] in TopSettings.model_fields:
            return "unknown setting here: it belongs above the first [table] of the file"
        return f"unknown setting{did_you_mean(path[-1], names)} (valid: {', '.join(names)})"
    for prefix in _PREFIXES:
        message = message.removeprefix(prefix)
    return message[:1].lower() + message[1:]


def _explain_value(item: ErrorDetails, field: FieldInfo | None) -> str | None:
    """What a value must be that is out of bounds, or of another kind."""
    kind, given = item["type"], _given(item["input"])
    if kind in _BOUNDS:
        unit = unit_of(field) if field is not None else None
        return f"must be {_BOUNDS[kind].format(**item['ctx'])}{f' {unit}' if unit else ''}{given}"
    if kind == "literal_error":
        return f"must be {item['ctx']['expected']}"
    for name, (what, example) in _KINDS.items():
        if kind.startswith(f"{name}_") and kind not in _RIGHT_KINDS:
            shown = _default(field) or example
            return f"must be {what}{f', such as {shown}' if shown else ''}{given}"
    return None


def _default(field: FieldInfo | None) -> str | None:
    """The default of a setting that is a number: as good an example as any."""
    default = field.default if field is not None else None
    return f"{default:g}" if isinstance(default, int | float) and not isinstance(default, bool) else None


def _given(value: object) -> str:
    """What was given, if it is a number: nothing else is sure to be no secret."""
    text = str(value) if isinstance(value, int | float | str) else ""
    try:
        float(text)
    except ValueError:
        return ""
    return f", not {text}" if len(text) <= _MOST_DIGITS else ""
