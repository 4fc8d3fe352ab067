"""Settings: typed, from four sources in a fixed order of strength, every problem told at once (contract C53, C54)."""

from kvtier_core.settings.layers import CONFIG_VARIABLE, LOG_VARIABLE
from kvtier_core.settings.load import load_settings, read_blocklist
from kvtier_core.settings.model import PoolSettings, Settings

__all__ = [
    "CONFIG_VARIABLE",
    "LOG_VARIABLE",
    "PoolSettings",
    "Settings",
    "load_settings",
    "read_blocklist",
]
