"""Settings: typed, from four sources in a fixed order of strength, every problem told at once (contract C53, C54)."""

from kvtier_core.settings.layers import CONFIG_VARIABLE, LOG_VARIABLE
from kvtier_core.settings.load import load_settings
from kvtier_core.settings.model import PoolSettings, Settings
from kvtier_core.settings.shown import ShownValue, show_settings

__all__ = [
    "CONFIG_VARIABLE",
    "LOG_VARIABLE",
    "PoolSettings",
    "Settings",
    "ShownValue",
    "load_settings",
    "show_settings",
]
