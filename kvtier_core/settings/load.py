"""From file, environment and arguments to validated settings, in four steps.

Read the layers; find out which tiers there are and import just their types; merge, now that every name's model is
known; validate everything and tell all problems at once.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from kvtier_core.errors import PluginError
from kvtier_core.plugins import TierType, load_policy, load_tier_type
from kvtier_core.policies import PolicyFactory
from kvtier_core.settings import blocklist
from kvtier_core.settings.environment import put_variables
from kvtier_core.settings.fields import find_secrets
from kvtier_core.settings.layers import Layers, Merged, SettingPath, dotted, read_layers, variable_for
from kvtier_core.settings.model import PoolSettings, Settings, TopSettings
from kvtier_core.settings.problems import Problems
from kvtier_core.settings.sense import in_order, order_findings, policies_named, pool_findings, tier_findings
from kvtier_core.settings.shown import sources_of
from kvtier_core.tier_settings import TierSettings

TIER_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_M = TypeVar("_M", bound=BaseModel)


def load_settings(
    *,
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Load and check a configuration.

    Init arguments (*overrides*, nested like the file) are stronger than the environment (``os.environ`` when
    *environ* is ``None``), which is stronger than the TOML *file* (the one ``KVTIER_CONFIG`` names when ``None``),
    which is stronger than the defaults. Tables merge; other values replace each other.

    Raises ``ConfigError`` listing all problems, or ``PluginError`` when tier types that can't be used are the only
    ones. Imports the configured tiers' plugins; opens nothing.
    """
    layers = read_layers(file, overrides, os.environ if environ is None else environ)
    problems = Problems()
    blocked = blocklist.blocked_in(layers) or frozenset()
    found = _TierTypes(layers, blocked, problems)
    merged = _merge(layers, found, problems)
    return _validate(layers, found, blocked, merged, problems)


class _TierTypes:
    """The type of each configured tier, loaded. ``models`` has ``None`` where there is none to be had."""

    def __init__(self, layers: Layers, blocked: frozenset[str], problems: Problems) -> None:
        self._blocked = blocked
        self.types: dict[str, TierType] = {}
        self.models: dict[str, type[BaseModel] | None] = {}
        self.unavailable: dict[str, str] = {}
        for name, origin in layers.tier_names().items():
            path = ("tiers", name)
            if layers.peek((*path, "type")) is None and origin == "env":
                continue  # made up by a misspelt variable, which is then reported as unknown
            self.models[name] = None
            if not TIER_NAME.fullmatch(name):
                problems.add(dotted(path), _bad_name(name))
            elif not layers.is_table(path):
                problems.add(dotted(path), "must be a table, such as [tiers.disk]")
            else:
                self._load(name, layers, problems)

    def _load(self, name: str, layers: Layers, problems: Problems) -> None:
        path = ("tiers", name, "type")
        wanted = layers.peek(path)
        if not isinstance(wanted, str):
            say = "is required" if wanted is None else "must be a text"
            example = f'type = "disk" in [tiers.{name}], or {variable_for(path)}'
            problems.add(dotted(path), f"{say}: set it, such as {example}")
            return
        try:
            self.types[name] = load_tier_type(wanted, self._blocked)
            self.models[name] = self.types[name].cls.Settings
        except PluginError as error:
            if _is_disabled(layers, name):
                self.unavailable[name] = str(error)
            else:
                problems.add_plugin(dotted(path), error)


def _bad_name(name: str) -> str:
    better = re.sub(r"[^a-z0-9]+", "_", name.lower()).lstrip("_0123456789").rstrip("_")
    hint = f", such as {better!r}" if TIER_NAME.fullmatch(better) else ""
    return (
        "a tier's name is lower case letters and digits with single underscores between, "
        f"so that variables can name it{hint}"
    )


def _is_disabled(layers: Layers, name: str) -> bool:
    try:
        return TypeAdapter(bool).validate_python(layers.peek(("tiers", name, "enabled"))) is False
    except ValidationError:
        return False


def _merge(layers: Layers, found: _TierTypes, problems: Problems) -> Merged:
    merged = Merged()
    for name, value in layers.file_data.items():
        merged.put((name,), value, f"file:{layers.file}")
    put_variables(layers.variables, found.models, merged, problems)
    for name, value in layers.overrides.items():
        merged.put((str(name),), value, "init")
    return merged


def _validate(
    layers: Layers, found: _TierTypes, blocked: frozenset[str], merged: Merged, problems: Problems
) -> Settings:
    pool = _build(PoolSettings, ("pool",), merged, problems)
    top = _build(TopSettings, (), merged, problems)
    tiers: dict[str, TierSettings] = {}
    for name, tier_type in found.types.items():
        tier = _build(tier_type.cls.Settings, ("tiers", name), merged, problems, tier_type.origin)
        if tier is not None:
            tiers[name] = tier
    if not isinstance(merged.table(("tiers",)), Mapping):
        problems.add("tiers", "must be a table with one table a tier, such as [tiers.disk]")
    _check_sense(layers, found, pool, top, tiers, merged, problems)
    policies = _load_policies(pool, tiers, blocked, merged, problems)
    problems.raise_if_any()
    assert pool is not None  # a section that could not be built has left a problem
    assert top is not None
    tiers = in_order(tiers, top.lookup_order)
    return Settings(
        pool=pool,
        tiers=tiers,
        tier_types={name: found.types[name] for name in tiers},
        on_reset=top.on_reset,
        lookup_order=top.lookup_order,
        blocked_plugins=top.blocked_plugins,
        policies=policies,
        file=layers.file,
        sources=sources_of(pool, top, tiers, merged),
        ignored_variables=layers.ignored,
        unavailable=found.unavailable,
    )


def _build(
    model: type[_M], path: SettingPath, merged: Merged, problems: Problems, plugin: str = "kvtier-core"
) -> _M | None:
    table = merged.table(path)
    if not isinstance(table, Mapping):
        problems.add(dotted(path), f"must be a table, such as [{dotted(path)}]")
        return None
    if not path:
        table = {name: value for name, value in table.items() if name not in ("pool", "tiers")}
    problems.hide(find_secrets(model, table))
    try:
        return model.model_validate(table)
    except ValidationError as error:
        problems.add_validation(error, path, model, merged)
    except Exception as error:  # noqa: BLE001 - a plugin's own validator; it is named and nothing else stops
        problems.add(dotted(path), f"the settings check of {plugin} failed: {type(error).__name__}: {error}")
    return None


def _check_sense(
    layers: Layers,
    found: _TierTypes,
    pool: PoolSettings | None,
    top: TopSettings | None,
    tiers: Mapping[str, TierSettings],
    merged: Merged,
    problems: Problems,
) -> None:
    findings = list(pool_findings(pool)) if pool is not None else []
    for name, tier in tiers.items():
        findings += tier_findings(name, tier, pool)
    if top is not None and len(tiers) == len(found.models) - len(found.unavailable):
        enabled = [name for name, tier in tiers.items() if tier.enabled]
        unordered = [name for name in enabled if layers.tier_names()[name] != "file"]
        findings += order_findings(enabled, unordered, top.lookup_order, found.models)
    if top is not None:
        findings += [(blocklist.SETTING, text) for text in blocklist.findings(top.blocked_plugins)]
    for path, message in findings:
        problems.add_at(path, message, merged)


def _load_policies(
    pool: PoolSettings | None,
    tiers: Mapping[str, TierSettings],
    blocked: frozenset[str],
    merged: Merged,
    problems: Problems,
) -> dict[str, PolicyFactory]:
    """The eviction policies that the pool and the tiers name; only their plugins are imported."""
    loaded: dict[str, PolicyFactory] = {}
    refused: dict[str, str] = {}
    for path, name in policies_named(pool, tiers):
        if name not in loaded and name not in refused:
            try:
                loaded[name] = load_policy(name, blocked)
            except PluginError as error:
                refused[name] = str(error)
        if name in refused:
            problems.add_at(path, refused[name], merged)
    return loaded
