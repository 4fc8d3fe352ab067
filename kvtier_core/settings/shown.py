"""How a configuration is shown: every value, where it came from, no secrets. Decides nothing about values."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from kvtier_core.masking import MASK, holds_only_secrets, mask_value
from kvtier_core.settings.fields import unit_of
from kvtier_core.settings.layers import Merged, SettingPath, dotted
from kvtier_core.settings.model import PoolSettings, Settings, TopSettings
from kvtier_core.tier_settings import TierSettings

_DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class ShownValue:
    """One value as it may be shown. ``value`` is plain data (text, number, list, truth value, ``None``).

    ``text`` is the same as a person would write it in the file: ``"2GiB"``, or ``-`` where nothing is set.
    """

    name: str
    value: object
    text: str
    source: str


_Value = tuple[SettingPath, object, str | None]
"""Where a value is, the value, secrets masked, and its unit."""


def _values(model: BaseModel, prefix: SettingPath) -> Iterator[_Value]:
    """Every value of *model*; those of tables (settings tables and plain ones) one by one."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        path = (*prefix, name)
        if isinstance(value, BaseModel):
            yield from _values(value, path)
        elif isinstance(value, Mapping) and value:
            for key, item in value.items():
                shown = MASK if holds_only_secrets(name) else mask_value(str(key), item)
                yield (*path, str(key)), shown, None
        else:
            yield path, mask_value(name, value), unit_of(field)


def _all_values(pool: PoolSettings, top: TopSettings, tiers: Mapping[str, TierSettings]) -> Iterator[_Value]:
    yield from _values(top, ())
    yield from _values(pool, ("pool",))
    for name, tier in tiers.items():
        yield from _values(tier, ("tiers", name))


def sources_of(
    pool: PoolSettings, top: TopSettings, tiers: Mapping[str, TierSettings], merged: Merged
) -> dict[str, str]:
    """Where each value came from, by dotted name, in the order in which values are shown."""
    return {dotted(path): merged.source_of(path) or _DEFAULT for path, _, _ in _all_values(pool, top, tiers)}


def show_settings(settings: Settings) -> list[ShownValue]:
    """Every value of *settings* with its source, secrets masked, tiers in lookup order.

    An unset ``capacity`` is shown as the tier type's own default, which is what holds.
    """
    top = TopSettings(**{name: getattr(settings, name) for name in TopSettings.model_fields})
    capacities: dict[SettingPath, int | None] = {
        ("tiers", name, "capacity"): tier_type.cls.info.resolve_capacity(settings.tiers[name].capacity)
        for name, tier_type in settings.tier_types.items()
    }
    shown = []
    for path, kept, unit in _all_values(settings.pool, top, settings.tiers):
        name, value = dotted(path), _plain(capacities.get(path, kept))
        source = settings.sources.get(name, _DEFAULT)
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


def exact_size(count: int) -> str:
    """Bytes in the largest binary unit that needs no fraction, so that nothing is rounded: ``"1536MiB"``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{unit}"
    return f"{count}B"
