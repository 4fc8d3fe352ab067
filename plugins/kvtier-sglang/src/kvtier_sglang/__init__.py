"""kvtier for SGLang: an external cache linker whose pages live in kvtier's pool and tiers.

Names load on first use (PEP 562): what names an SGLang type is imported only inside SGLang, after ``compat`` has looked
at the release that is there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_sglang.linker import KvtierLinker

__all__ = ["KvtierLinker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module(f"{__name__}.compat").check_sglang()
    return import_module(f"{__name__}.linker").KvtierLinker


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
