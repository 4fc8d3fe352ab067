"""From file, environment and arguments to validated settings, in four steps.

Read the layers; find out which tiers there are and import just their types; merge, now that every name's model is
known; validate everything and tell all problems at once.

``blocked_plugins`` is read first, because it decides which plugins may be imported at all. A malformed list blocks
nothing; it is told with all other problems, and nothing starts with it.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from kvtier_core.errors import ConfigError, PluginError
from kvtier_core.plugins import TierType, class_of_tier, load_policy, load_tier_type
from kvtier_core.plugins.discovery import normalized
from kvtier_core.policies import PolicyFactory
from kvtier_core.settings.fields import SettingPath, field_paths, find_secrets, values_in, wants_json
from kvtier_core.settings.layers import (
    KNOWN_VARIABLES,
    Layers,
    Merged,
    Variable,
    dotted,
    read_layers,
    variable_for,
)
from kvtier_core.settings.model import PoolSettings, Settings, TopSettings
from kvtier_core.settings.problems import Problems
from kvtier_core.settings.sense import blocklist_findings, order_findings, pool_findings, tier_findings
from kvtier_core.suggest import did_you_mean
from kvtier_core.tier_settings import TierSettings

_POOL = "pool"
TIER_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_DISTRIBUTIONS = TypeAdapter(tuple[str, ...])
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
    return _Loading(read_layers(file, overrides, os.environ if environ is None else environ)).load()


def read_blocklist(file: Path | None = None) -> frozenset[str]:
    """The blocked distributions of a configuration, for tools that need nothing else of it.

    *file* and the environment are read as ``load_settings`` reads them. Raises ``ConfigError`` when the file can't be
    read or the value is malformed.
    """
    blocked = _blocked_in(read_layers(file, None, os.environ))
    if blocked is None:
        raise ConfigError('blocked_plugins: must be a list of distributions, such as ["kvtier-disk"]')
    return blocked


def _blocked_in(layers: Layers) -> frozenset[str] | None:
    """The normalized names of blocked distributions, or ``None`` where the value is malformed."""
    value = layers.peek(("blocked_plugins",))
    validate = _DISTRIBUTIONS.validate_json if isinstance(value, str) else _DISTRIBUTIONS.validate_python
    try:
        return frozenset(map(normalized, validate(value or ())))  # type: ignore[arg-type]
    except ValidationError:
        return None


class _Loading:
    """One configuration on its way from layers to settings."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._blocked = _blocked_in(layers) or frozenset()
        self._problems = Problems()
        self._merged = Merged()
        self._types: dict[str, TierType] = {}
        self._models: dict[str, type[BaseModel] | None] = {}
        """The settings model of each configured tier; ``None`` where there is none to be had."""
        self._unavailable: dict[str, str] = {}

    def load(self) -> Settings:
        for name, origin in self._layers.tier_names().items():
            self._find_type(name, origin)
        self._merge()
        pool = self._build(PoolSettings, ("pool",))
        top = self._build(TopSettings, ())
        tiers: dict[str, TierSettings] = {}
        for name, tier_type in self._types.items():
            tier = self._build(tier_type.cls.Settings, ("tiers", name), tier_type.origin)
            if tier is not None:
                tiers[name] = tier
        if not isinstance(self._merged.table(("tiers",)), Mapping):
            self._problems.add("tiers", "must be a table with one table a tier, such as [tiers.disk]")
        self._check_sense(pool, top, tiers)
        policies = self._load_policies(pool, tiers)
        self._problems.raise_if_any()
        assert pool is not None  # a section that could not be built has left a problem
        assert top is not None
        tiers = _in_order(tiers, top.lookup_order)
        return Settings(
            pool=pool,
            tiers=tiers,
            tier_types={name: self._types[name] for name in tiers},
            **dict(top),
            policies=policies,
            file=self._layers.file,
            sources=self._sources(
                {(): top, ("pool",): pool, **{("tiers", name): tiers[name] for name in tiers}}
            ),
            ignored_variables=self._layers.ignored,
            unavailable=self._unavailable,
        )

    def _sources(self, tables: Mapping[SettingPath, BaseModel]) -> dict[str, str]:
        """Where each value came from, by dotted name, in the order in which values are shown."""
        paths = [path for at, table in tables.items() for path, _, _ in values_in(table, at)]
        return {dotted(path): self._merged.source_of(path) or "default" for path in paths}

    def _find_type(self, name: str, origin: str) -> None:
        """Load the type of the tier *name*, which the layer *origin* brought up."""
        path = ("tiers", name)
        wanted = self._layers.peek((*path, "type"))
        if wanted is None and origin == "env":
            return  # made up by a misspelt variable, which is then reported as unknown
        self._models[name] = None
        if not TIER_NAME.fullmatch(name):
            self._problems.add(dotted(path), _bad_name(name))
        elif name == _POOL:
            self._problems.add(
                dotted(path), "hits and events of the pool go by this name: give the tier another"
            )
        elif not self._layers.is_table(path):
            self._problems.add(dotted(path), "must be a table, such as [tiers.disk]")
        elif not isinstance(wanted, str):
            say = "is required" if wanted is None else "must be a text"
            example = f'type = "disk" in [tiers.{name}], or {variable_for((*path, "type"))}'
            self._problems.add(dotted((*path, "type")), f"{say}: set it, such as {example}")
        else:
            self._load_type(name, wanted)

    def _load_type(self, name: str, wanted: str) -> None:
        try:
            self._types[name] = load_tier_type(wanted, self._blocked)
            self._models[name] = self._types[name].cls.Settings
        except PluginError as error:
            if _is_disabled(self._layers, name):
                self._unavailable[name] = str(error)
            else:
                self._problems.add_plugin(f"tiers.{name}.type", error)

    def _merge(self) -> None:
        for name, value in self._layers.file_data.items():
            self._merged.put((name,), value, f"file:{self._layers.file}")
        self._put_variables()
        for name, value in self._layers.overrides.items():
            self._merged.put((str(name),), value, "init")

    def _put_variables(self) -> None:
        """Variables that are settings count. Any other is a mistake that nothing else would notice: it sets nothing."""
        models: dict[SettingPath, type[BaseModel] | None] = {(): TopSettings, ("pool",): PoolSettings}
        models |= {("tiers", name): model for name, model in self._models.items()}
        settings = {
            variable_for(path): annotation
            for at, model in models.items()
            if model is not None
            for path, annotation in field_paths(model, at)
        }
        for variable in self._layers.variables:
            name, value = variable.name, variable.text
            if models.get(variable.path[:2], BaseModel) is None:
                continue  # what is wrong there is already known, and its settings can't be
            if name not in settings:
                self._problems.add(name, f"unknown environment variable{_hint(variable, settings)}")
                continue
            if wants_json(settings[name]):
                try:
                    value = json.loads(value)
                except json.JSONDecodeError:
                    expected = """expected JSON, such as ["a", "b"] for a list or {"name": "value"}"""
                    self._problems.add(name, expected)
                    continue
            self._merged.put(variable.path, value, f"env:{name}")

    def _build(self, model: type[_M], path: SettingPath, plugin: str = "kvtier-core") -> _M | None:
        table = self._merged.table(path)
        if not isinstance(table, Mapping):
            self._problems.add(dotted(path), f"must be a table, such as [{dotted(path)}]")
            return None
        if not path:
            table = {name: value for name, value in table.items() if name not in ("pool", "tiers")}
        self._problems.hide(find_secrets([model], table))
        try:
            return model.model_validate(table)
        except ValidationError as error:
            self._problems.add_validation(error, path, model, self._merged)
        except Exception as error:  # noqa: BLE001 - a plugin's own validator; it is named and nothing else stops
            message = f"the settings check of {plugin} failed: {type(error).__name__}: {error}"
            self._problems.add(dotted(path), message)
        return None

    def _check_sense(
        self, pool: PoolSettings | None, top: TopSettings | None, tiers: Mapping[str, TierSettings]
    ) -> None:
        findings = list(pool_findings(pool)) if pool is not None else []
        for name, tier in tiers.items():
            info = class_of_tier(self._types[name], tier).info
            findings += tier_findings(name, tier, info, pool)
        if top is not None and len(tiers) == len(self._models) - len(self._unavailable):
            enabled = [name for name, tier in tiers.items() if tier.enabled]
            unordered = [name for name in enabled if self._layers.tier_names()[name] != "file"]
            findings += order_findings(enabled, unordered, top.lookup_order, self._models)
        if top is not None:
            findings += blocklist_findings(top.blocked_plugins)
        for path, message in findings:
            self._problems.add_at(path, message, self._merged)

    def _load_policies(
        self, pool: PoolSettings | None, tiers: Mapping[str, TierSettings]
    ) -> dict[str, PolicyFactory]:
        """The eviction policies that the pool and the tiers name; only their plugins are imported."""
        named: dict[SettingPath, str] = {} if pool is None else {("pool", "policy"): pool.policy}
        named |= {("tiers", name, "policy"): tier.policy for name, tier in tiers.items()}
        loaded: dict[str, PolicyFactory] = {}
        for path, name in named.items():
            if name not in loaded:
                try:
                    loaded[name] = load_policy(name, self._blocked)
                except PluginError as error:
                    self._problems.add_at(path, str(error), self._merged)
        return loaded


def _hint(variable: Variable, settings: Mapping[str, object]) -> str:
    """What to do about a variable that is none of the *settings*, which are given with their annotations."""
    if variable.name == variable_for(variable.path):
        around = (variable_for(variable.path[:length]) for length in range(1, len(variable.path)))
        whole = next((name for name in around if name in settings and wants_json(settings[name])), None)
        if whole is not None:
            return f"; set {whole} to a JSON object"
    name, known = variable.name.upper(), sorted({*KNOWN_VARIABLES, *settings})
    inside = [item for item in known if item.startswith(f"{name}__")]
    return f"; it names a table: set its values, such as {inside[0]}" if inside else did_you_mean(name, known)


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


def _in_order(
    tiers: Mapping[str, TierSettings], lookup_order: tuple[str, ...] | None
) -> dict[str, TierSettings]:
    """The tiers in lookup order, those that are not in it last, of them the enabled ones first."""
    names = [name for name in lookup_order or () if name in tiers]
    rest = [name for name in tiers if name not in names]
    rest.sort(key=lambda name: not tiers[name].enabled)
    return {name: tiers[name] for name in (*names, *rest)}
