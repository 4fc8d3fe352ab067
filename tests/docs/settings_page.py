"""Makes docs/reference/settings.md from the settings models: each setting with type, default, unit and meaning."""

import types
import typing
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvtier.shown import text_of
from kvtier_core import load_tier_type
from kvtier_core.settings import PoolSettings
from kvtier_core.settings.fields import unit_of
from kvtier_core.settings.model import TopSettings
from kvtier_core.tier_settings import TierLimits, TierSettings

HEAD = """# Settings

Settings come from init arguments, environment variables, one TOML file and the defaults below, in that order of
strength. A setting `NAME` of the table `[tiers.disk]` is the variable `KVTIER_TIERS__DISK__NAME`; lists and tables in
variables are JSON. `kvtier config` shows every value and where it came from, `kvtier config --check` only what is
wrong, and `kvtier config --schema` prints the JSON Schema of the file for editors.

Sizes are numbers of bytes or texts such as `"8GiB"`, `"512MB"`; times are seconds or texts such as `"30s"`, `"250ms"`,
`"2h"`. An unknown name anywhere is an error.

Two variables are no settings: `KVTIER_CONFIG` names the file. `KVTIER_LOG` is the log level of the `kvtier` commands
(debug, info, warning, error); an engine has the level of Python's logger `kvtier`.

This page is made from the code (`UPDATE_DOCS=1 pytest tests/docs`).
"""
OURS = ("disk", "fsspec", "memory", "mooncake", "valkey")
_WORDS: dict[object, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    SecretStr: "text (secret)",
    Path: "path",
    dict: "table",
    list: "list of texts",
    tuple: "list of texts",
}


def make_page() -> str:
    """The whole page."""
    parts = [
        HEAD,
        _section("Above the first table", TopSettings),
        _section("`[pool]`", PoolSettings),
        _section("`[tiers.NAME]`, whatever the type", TierSettings, leave_out=("limits",)),
        _section("`[tiers.NAME.limits]`", TierLimits),
    ]
    for name in OURS:
        tier_type = load_tier_type(name)
        title = f'`[tiers.NAME]` with `type = "{name}"` ({tier_type.distribution})'
        capacity, model = tier_type.cls.info.default_capacity, tier_type.cls.Settings
        note = (
            f"`capacity` is {text_of(capacity, 'bytes')} where it is unset." if capacity is not None else ""
        )
        of_all = [name for name, field in TierSettings.model_fields.items() if _is_same(field, model, name)]
        parts.append(_section(title, model, leave_out=of_all, note=note))
    return "\n".join(parts)


def _is_same(field: FieldInfo, model: type[BaseModel], name: str) -> bool:
    """Whether the type has the core's own default for a setting of all types."""
    return bool(model.model_fields[name].default == field.default)


def _section(title: str, model: type[BaseModel], *, leave_out: Iterable[str] = (), note: str = "") -> str:
    left_out = set(leave_out)
    lines = [f"## {title}", "", *([note, ""] if note else [])]
    lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name in left_out:
            continue
        unit = unit_of(field)
        default = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else text_of(default, unit)
        cells = [f"`{name}`", _type(field.annotation, unit), "unset" if shown == "-" else f"`{shown}`"]
        if shown == "required":
            cells[2] = shown
        meaning = " ".join((field.description or "").split())
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, meaning)) + " |")
    return "\n".join([*lines, ""])


def _type(annotation: object, unit: str | None) -> str:
    if unit is not None:
        return {"bytes": "size (bytes)", "seconds": "time (seconds)"}[unit]
    arguments = typing.get_args(annotation)
    kind = typing.get_origin(annotation)
    if kind is typing.Annotated:
        return _type(arguments[0], unit)
    if kind in (typing.Union, types.UnionType):
        return " or ".join(_type(part, unit) for part in arguments if part is not types.NoneType)
    if kind is typing.Literal:
        return " or ".join(f'`"{part}"`' for part in arguments)
    return _WORDS[kind or annotation]
