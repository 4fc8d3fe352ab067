"""The layers a configuration is made of, and how they merge: init arguments > environment > TOML file.

This module decides which source wins, name by name (tables merge, everything else is replaced). Its callers decide
what a name means. pydantic-settings is not used for this: it drops unknown variables in silence, needs all models
before the tier types are known, and does not say where a value is from.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier_core.errors import ConfigError
from kvtier_core.settings.fields import SettingPath

PREFIX = "KVTIER_"
CONFIG_VARIABLE = "KVTIER_CONFIG"
LOG_VARIABLE = "KVTIER_LOG"
KNOWN_VARIABLES = (CONFIG_VARIABLE, LOG_VARIABLE)

# What Kubernetes puts into every pod of a namespace that has a Service called kvtier or kvtier-something.
_KUBERNETES = re.compile(
    r"KVTIER_(?:[A-Z0-9]+_)*"
    r"(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)"
)
_TOML_LINE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def dotted(path: SettingPath) -> str:
    """The name of a setting as messages show it: ``tiers.disk.root``."""
    return ".".join(path)


def variable_for(path: SettingPath) -> str:
    """The environment variable that sets *path*: ``KVTIER_TIERS__DISK__ROOT``."""
    return PREFIX + "__".join(path).upper()


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable that may be a setting. ``path`` is what its name says, whether or not it exists."""

    name: str
    path: SettingPath
    text: str = field(repr=False)


def _value_at(data: Mapping[str, Any], path: SettingPath) -> object:
    value: Any = data
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What each source says, unmerged."""

    file: Path | None
    file_data: Mapping[str, Any] = field(repr=False)
    variables: tuple[Variable, ...]
    ignored: tuple[str, ...]
    overrides: Mapping[str, Any] = field(repr=False)

    def peek(self, path: SettingPath) -> object:
        """The strongest value given for exactly *path*, undecoded, or ``None``."""
        text = next((item.text for item in self.variables if item.path == path), None)
        values = (_value_at(self.overrides, path), text, _value_at(self.file_data, path))
        return next((value for value in values if value is not None), None)

    def is_table(self, path: SettingPath) -> bool:
        """Whether the file and the overrides, where they have *path* at all, have a table there."""
        values = (_value_at(self.file_data, path), _value_at(self.overrides, path))
        return all(value is None or isinstance(value, Mapping) for value in values)

    def tier_names(self) -> dict[str, str]:
        """Every tier name with the kind of its first source: ``"file"``, ``"init"`` or ``"env"``; file order first."""
        names: dict[str, str] = {}
        for kind, data in (("file", self.file_data), ("init", self.overrides)):
            tiers = data.get("tiers")
            for name in tiers if isinstance(tiers, Mapping) else ():
                names.setdefault(name, kind)
        for variable in self.variables:
            if len(variable.path) > 2 and variable.path[0] == "tiers":  # noqa: PLR2004 - tiers, NAME, setting
                names.setdefault(variable.path[1], "env")
        return names


class Merged:
    """Values by path, each with its source. Later ``put`` calls win."""

    def __init__(self) -> None:
        self._entries: dict[SettingPath, tuple[Any, str]] = {}

    def put(self, path: SettingPath, value: object, source: str) -> None:
        """Set *path*; a non-empty table merges into what is there, anything else replaces it."""
        if isinstance(value, Mapping) and value:
            for name, item in value.items():
                self.put((*path, str(name)), item, source)
            return
        inside = [known for known in self._entries if known[: len(path)] == path]
        if isinstance(value, Mapping) and any(known != path for known in inside):
            return  # an empty table changes nothing in a table that has values
        around = [path[:length] for length in range(len(path)) if path[:length] in self._entries]
        for known in (*inside, *around):
            del self._entries[known]
        self._entries[path] = (value, source)

    def table(self, prefix: SettingPath) -> Any:  # noqa: ANN401 - what the user wrote, of any type
        """What is at *prefix*: a nested dictionary, or the bare value somebody put where a table belongs."""
        if prefix in self._entries:
            return self._entries[prefix][0]
        tree: dict[str, Any] = {}
        for path, (value, _) in self._entries.items():
            if path[: len(prefix)] == prefix:
                inner = tree
                for part in path[len(prefix) : -1]:
                    inner = inner.setdefault(part, {})
                inner[path[-1]] = value
        return tree

    def source_of(self, path: SettingPath) -> str | None:
        """Where the value at *path* was set, the value around it, or the first inside it; ``None`` when nobody did."""
        around = (path[:length] for length in range(len(path), 0, -1))
        inside = (known for known in self._entries if known[: len(path)] == path)
        return next((self._entries[known][1] for known in (*around, *inside) if known in self._entries), None)


def read_layers(file: Path | None, overrides: Mapping[str, Any] | None, environ: Mapping[str, str]) -> Layers:
    """Read the file (the one ``KVTIER_CONFIG`` names when *file* is ``None``) and split the environment.

    Raises ``ConfigError`` when the file can't be read or is not TOML.
    """
    if file is None and environ.get(CONFIG_VARIABLE):
        file = Path(environ[CONFIG_VARIABLE])
    names = sorted(name for name in environ if name.startswith(PREFIX) and name not in KNOWN_VARIABLES)
    ignored = tuple(name for name in names if _KUBERNETES.fullmatch(name))
    variables = (
        Variable(name=name, path=tuple(name.removeprefix(PREFIX).lower().split("__")), text=environ[name])
        for name in names
        if name not in ignored
    )
    return Layers(
        file=file,
        file_data={} if file is None else _read_toml(file),
        variables=tuple(variables),
        ignored=ignored,
        overrides=overrides or {},
    )


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_bytes().decode()
        return tomllib.loads(text)
    except OSError as error:
        problem = f"can't read the configuration {os.fspath(file)}: {error.strerror or error}"
    except tomllib.TOMLDecodeError as error:
        problem = _toml_problem(file, str(error))
    except RecursionError:
        problem = f"{os.fspath(file)}: not valid TOML: nested too deep"
    except UnicodeDecodeError as error:
        problem = f"{os.fspath(file)} is not UTF-8 text (byte {error.start}), so it can't be TOML"
    raise ConfigError(problem)  # outside the handlers: the caught error quotes the file, secrets included


def _toml_problem(file: Path, message: str) -> str:
    match = _TOML_LINE.search(message)
    place = f", line {match[1]}, column {match[2]}" if match and match[1] else ", at its end"
    return f"{os.fspath(file)}{place}: not valid TOML: {_TOML_LINE.sub('', message)}"
