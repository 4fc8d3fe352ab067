"""kvtier for vLLM: an offloading spec whose blocks live in kvtier's pool and tiers.

Names load on first use (PEP 562): what names a vLLM type is imported only inside vLLM, after ``compat`` has looked at
the release that is there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_vllm.bridge import KvtierTier
    from kvtier_vllm.spec import KvtierSpec

__all__ = ["KvtierSpec", "KvtierTier"]

_HOMES = {"KvtierSpec": "spec", "KvtierTier": "bridge"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module(f"{__name__}.compat").check_vllm()
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
