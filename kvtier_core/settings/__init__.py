"""Settings: typed, from four sources in a fixed order of strength, every problem told at once (contract C53, C54)."""

from kvtier_core.settings.layers import CONFIG_VARIABLE, LOG_VARIABLE
from kvtier_core.settings.load import load_settings, read_blocklist
from kvtier_core.settings.model import PoolSettings, Settings
from kvtier_core.settings.schema import make_schema
from kvtier_core.settings.shown import ShownValue, exact_size, show_settings

__all__ = [
    "CONFIG_VARIABLE",
    "LOG_VARIABLE",
    "PoolSettings",
    "Settings",
    "ShownValue",
    "exact_size",
    "load_settings",
    "make_schema",
    "read_blocklist",
    "show_settings",
]
