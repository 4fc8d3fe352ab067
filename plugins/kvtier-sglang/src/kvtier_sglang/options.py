"""What SGLang's option for a linker or a storage may say to kvtier, checked before anything starts.

Decides which names are known and what kvtier's settings are made of. It opens nothing and names no SGLang type.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier_core import ConfigError, Settings, load_settings

OURS = {
    "kvtier_config": "absolute path of a kvtier.toml",
    "kvtier": "table of kvtier's settings, stronger than the file and the environment",
}


def load_options(extra_config: Mapping[str, Any], option: str = "linker_extra_config") -> Settings:
    """The settings: the table in *extra_config*, SGLang's *option*, over the environment over the file.

    Raises ``ConfigError`` that names every option it does not know, and as ``load_settings`` does.
    """
    unknown = sorted(set(extra_config) - set(OURS))
    if unknown:
        allowed = "; ".join(f"{name} ({what})" for name, what in OURS.items())
        raise ConfigError(
            f"{option}: kvtier knows no {', '.join(map(repr, unknown))}. Allowed are: {allowed}. Settings "
            "of pool and tiers belong into the table 'kvtier' or the file 'kvtier_config'"
        )
    file, table = extra_config.get("kvtier_config"), extra_config.get("kvtier", {})
    if file is not None and not (isinstance(file, str) and Path(file).is_absolute()):
        raise ConfigError(
            f"kvtier_config = {file!r} must be an absolute path: SGLang's processes need not share a directory"
        )
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"kvtier must be a table, such as {{'pool': {{'capacity': '4GiB'}}}}, not a {type(table).__name__}"
        )
    return load_settings(file=None if file is None else Path(file), overrides=table)
