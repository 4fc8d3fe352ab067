"""What SGLang calls in each of its processes (entry point ``sglang.srt.plugins``).

It hooks the calls that change weights, adds kvtier's figures to what SGLang says of itself, and turns the linker on
where ``KVTIER_CONFIG`` names a settings file.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

from kvtier_core import PluginError
from kvtier_sglang.changes import CHANGES
from kvtier_sglang.compat import check_sglang
from kvtier_sglang.figures import FIGURES

_log = logging.getLogger("kvtier.sglang")

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
CHANGING = (
    "begin_weight_update",
    "end_weight_update",
    "resume_memory_occupation",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)
"""SGLang's methods that change weights."""
LINKER: Mapping[str, Any] = {
    "enable_unified_cache_external_linker": True,
    "unified_cache_external_linker_backend": "dynamic",
    "unified_cache_external_linker_config": {"linker": "KvtierLinker", "linker_module_path": "kvtier_sglang"},
}
"""The arguments that turn the linker on."""
_OTHERS = (
    "disable_radix_cache",
    "enable_flexkv",
    "enable_hierarchical_cache",
    "enable_lmcache",
    "hicache_storage_backend",
    "enable_unified_cache_external_linker",
    "radix_cache_backend",
    "unified_cache_external_linker_config",
)
"""Arguments by which an operator chose a cache: kvtier does not put itself in its place."""


def register() -> None:
    """Register the hooks. In an SGLang of another release there are none, and the linker is refused by name."""
    try:
        check_sglang()
    except PluginError as error:
        _log.warning("%s", error)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - looked at first

    for method in CHANGING:
        HookRegistry.register(f"{_UPDATER}.{method}", CHANGES.note, HookType.BEFORE)
    HookRegistry.register(f"{_STATE}.get_internal_state", FIGURES.add, HookType.AFTER)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.resolve_once", _turn_on, HookType.BEFORE)
    CHANGES.is_watched = True


def _turn_on(server_args: Any) -> None:
    """Have *server_args* use kvtier, unless they name a cache already, or no settings file is named.

    Where SGLang has resolved them before, it changes nothing: they have the linker then, or never will.
    """
    if getattr(server_args, "_resolution_finished", False):
        return
    if not os.environ.get("KVTIER_CONFIG") or any(getattr(server_args, name) for name in _OTHERS):
        return
    for name, value in LINKER.items():
        setattr(server_args, name, value)
