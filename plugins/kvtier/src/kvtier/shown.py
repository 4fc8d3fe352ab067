"""How a configuration is shown: every value, where it came from, no secrets. Decides nothing about values."""

import json
from dataclasses import dataclass

from kvtier_core.settings import Settings
from kvtier_core.settings.fields import SettingPath, values_in
from kvtier_core.settings.layers import dotted
from kvtier_core.settings.model import TopSettings
from kvtier_core.units import exact_size


@dataclass(frozen=True, kw_only=True)
class ShownValue:
    """One value as it may be shown. ``value`` is plain data (text, number, list, truth value, ``None``).

    ``text`` is the same as a person would write it in the file: ``"2GiB"``, or ``-`` where nothing is set.
    """

    name: str
    value: object
    text: str
    source: str


def show_settings(settings: Settings) -> list[ShownValue]:
    """Every value of *settings* with its source, secrets masked, tiers in lookup order.

    An unset ``capacity`` is shown as the tier type's own default, which is what holds.
    """
    capacities: dict[SettingPath, int | None] = {
        ("tiers", name, "capacity"): tier_type.cls.info.resolve_capacity(settings.tiers[name].capacity)
        for name, tier_type in settings.tier_types.items()
    }
    top = TopSettings(**{name: getattr(settings, name) for name in TopSettings.model_fields})
    values = [*values_in(top, ()), *values_in(settings.pool, ("pool",))]
    for name, tier in settings.tiers.items():
        values += values_in(tier, ("tiers", name))
    shown = []
    for path, kept, unit in values:
        name, value = dotted(path), _plain(capacities.get(path, kept))
        source = settings.sources.get(name, "default")
        shown.append(ShownValue(name=name, value=value, text=text_of(value, unit), source=source))
    return shown


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else str(value)


def text_of(value: object, unit: str | None) -> str:
    """*value* as a person would write it in the file; ``-`` where nothing is set."""
    if value is None:
        return "-"
    if unit == "bytes" and isinstance(value, int):
        return f'"{exact_size(value)}"'
    if unit == "seconds" and isinstance(value, float):
        return f'"{value:g}s"'
    return json.dumps(value, ensure_ascii=False)
