"""kvtier for transformers: a KV cache whose blocks live on in kvtier's tiers.

Names load on first use (PEP 562), so that the command line can ask this package for its commands without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_transformers.cache import DeviceKV
    from kvtier_transformers.cached_prompt import Prompt
    from kvtier_transformers.engine import Engine
    from kvtier_transformers.errors import CacheError
    from kvtier_transformers.models import LoadedModel, load
    from kvtier_transformers.namespace import namespace_for
    from kvtier_transformers.support import check_model

__all__ = [
    "CacheError",
    "DeviceKV",
    "Engine",
    "LoadedModel",
    "Prompt",
    "check_model",
    "load",
    "namespace_for",
]

_HOMES = {
    "CacheError": "errors",
    "DeviceKV": "cache",
    "Engine": "engine",
    "LoadedModel": "models",
    "Prompt": "cached_prompt",
    "check_model": "support",
    "load": "models",
    "namespace_for": "namespace",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
