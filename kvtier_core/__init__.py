"""kvtier offloads the KV cache of language models from the GPU to host memory, disk and object storage.

The public names are in three modules, by who imports them: ``kvtier_core.tier`` for tiers, ``kvtier_core.engine`` and
``kvtier_core.transfer`` for engine adapters, and this one for both. Importing ``kvtier_core`` brings in none of torch,
numpy and pydantic: each name is imported when it is first used.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_core.errors import (
        ClosedError,
        ConfigError,
        KvtierError,
        PluginError,
        PoolError,
        TierOpenError,
        UnknownRequestError,
        UnsupportedModelError,
    )
    from kvtier_core.plugins import TierType, check_tier_class, load_tier_type
    from kvtier_core.settings import Settings, load_settings

    __version__: str

__all__ = [
    "ClosedError",
    "ConfigError",
    "KvtierError",
    "PluginError",
    "PoolError",
    "Settings",
    "TierOpenError",
    "TierType",
    "UnknownRequestError",
    "UnsupportedModelError",
    "__version__",
    "check_tier_class",
    "load_settings",
    "load_tier_type",
]
_HOMES = dict.fromkeys((name for name in __all__ if name.endswith("Error")), "errors") | {
    "Settings": "settings",
    "TierType": "plugins",
    "check_tier_class": "plugins",
    "load_settings": "settings",
    "load_tier_type": "plugins",
}
_AUDIENCES = ("tier", "engine")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    """Import a public name when it is first used; one of 0.1 that has moved to an audience's module, with a warning."""
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("kvtier-core")
    elif name in _HOMES:
        value = getattr(import_module(f"kvtier_core.{_HOMES[name]}"), name)
    elif not name.startswith("_"):
        return _moved(name)
    else:
        raise AttributeError(f"module 'kvtier_core' has no attribute {name!r}")
    globals()[name] = value
    return value


def _moved(name: str) -> Any:  # noqa: ANN401 - any public name
    for audience in _AUDIENCES:
        module = import_module(f"kvtier_core.{audience}")
        if name in module.__all__:
            text = f"kvtier_core.{name} is kvtier_core.{audience}.{name} now; the old name ends with kvtier-core 2.0"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            return getattr(module, name)
    raise AttributeError(f"module 'kvtier_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names and what the module has of its own."""
    return sorted({*globals(), *__all__})
