"""kvtier for SGLang: an external cache linker, and a storage of HiCache's, on kvtier's pool and tiers.

Names load on first use (PEP 562): what names an SGLang type is imported only inside SGLang, after ``compat`` has looked
at the release that is there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_sglang.hicache import KvtierHiCache
    from kvtier_sglang.linker import KvtierLinker

__all__ = ["KvtierHiCache", "KvtierLinker"]

_HOMES = {"KvtierHiCache": ("hicache", "check_hicache"), "KvtierLinker": ("linker", "check_sglang")}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, check = _HOMES[name]
    getattr(import_module(f"{__name__}.compat"), check)()
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
