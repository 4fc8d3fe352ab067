"""Says whether the SGLang that is there is one this plugin was made for: by release, and by the interface itself.

SGLang's linker interface is young and has changed within weeks. A release that looks alike but is not must fail at the
start, by name, and not at the first request.
"""

from collections.abc import Sequence
from importlib import import_module

from kvtier_core import PluginError
from kvtier_core.engine import find_differences

SUPPORTED = ("0.5.23",)
_INSTALL = 'install sglang 0.5.23, such as "sglang==0.5.23", or a kvtier-sglang made for this one'

_LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
_STATE = "sglang.srt.managers.scheduler_components.internal_state"
SIGNATURES = {
    f"{_LINKER}:UnifiedCacheLinker.lookup": "self, rid, transfers",
    f"{_LINKER}:UnifiedCacheLinker.load": "self, rid, transfers",
    f"{_LINKER}:UnifiedCacheLinker.start_layer_wise_loading": "self",
    f"{_LINKER}:UnifiedCacheLinker.finish_layer_wise_loading": "self, counter_index",
    f"{_LINKER}:UnifiedCacheLinker.cancel_queued_load": "self, rid",
    f"{_LINKER}:UnifiedCacheLinker.offload": "self, transfers, session_id",
    f"{_LINKER}:UnifiedCacheLinker.num_completed_offloads": "self",
    f"{_LINKER}:UnifiedCacheLinker.pop_completed_offload": "self",
    f"{_LINKER}:UnifiedCacheLinker.reset": "self",
    f"{_LINKER}:UnifiedCacheLinker.close": "self",
    "sglang.srt.mem_cache.unified_cache.linker_factory:create_unified_cache_linker": (
        "server_args, params, backend, config, components, forward_stream"
    ),
    "sglang.srt.mem_cache.utils:get_storage_hash_str": "key, prior_hash, page_size",
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.get_key_buffer": "self, layer_id",
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.get_value_buffer": "self, layer_id",
    "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool.get_key_buffer": "self, layer_id",
    "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool.get_value_buffer": "self, layer_id",
    "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool.get_key_buffer": "self, layer_id, scale",
    "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool.get_value_buffer": "self, layer_id, scale",
    "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.mamba2_layer_cache": "self, layer_id",
    "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator.get_kvcache": "self",
    "sglang.srt.arg_groups.arg_utils:namespace_of": "cls",
    "sglang.srt.arg_groups.overrides:resolution_result": "server_args, field, default",
    "sglang.srt.configs.model_config:ModelConfig.from_server_args": (
        "server_args, model_path, model_revision, is_draft_model, context_length, kwargs"
    ),
    "sglang.srt.server_args:ServerArgs.resolve_once": "self",
    "sglang.srt.plugins.hook_registry:HookRegistry.register": "target, hook, hook_type, source",
    f"{_STATE}:SchedulerInternalStateController.get_internal_state": "self, recv_req",
    f"{_UPDATER}:SchedulerWeightUpdaterManager.update_weights_from_disk": "self, recv_req",
    f"{_UPDATER}:SchedulerWeightUpdaterManager.update_weights_from_distributed": "self, recv_req",
    f"{_UPDATER}:SchedulerWeightUpdaterManager.update_weights_from_tensor": "self, recv_req",
    f"{_UPDATER}:SchedulerWeightUpdaterManager.update_weights_from_ipc": "self, recv_req",
    f"{_UPDATER}:SchedulerWeightUpdaterManager.begin_weight_update": "self, recv_req",
    f"{_UPDATER}:SchedulerWeightUpdaterManager.end_weight_update": "self, recv_req",
    f"{_UPDATER}:SchedulerWeightUpdaterManager.resume_memory_occupation": "self, recv_req",
}
"""The parameters of what is called, overridden or hooked."""
NAMES = {
    f"{_LINKER}:UnifiedCacheLinker": "",
    "sglang.srt.mem_cache.hicache_storage:PoolName": "KV, MAMBA, SWA",
    "sglang.srt.mem_cache.hicache_storage:PoolTransfer": "name, device_indices, keys",
    "sglang.srt.mem_cache.unified_cache.component_type:ComponentType": "FULL, MAMBA, SWA",
    "sglang.srt.mem_cache.cache_init_params:CacheInitParams": (
        "token_to_kv_pool_allocator, req_to_token_pool, page_size, tp_cache_group, attn_tp_cache_group, "
        "swa_retain_window, swa_gates_prefix_match, decoder_swa_bounded_replay"
    ),
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool": "is_quantized_kv_cache",
    "sglang.srt.mem_cache.memory_pool:MambaPool.State": "conv, temporal",
    "sglang.srt.managers.io_struct:GetInternalStateReqOutput": "internal_state",
    "sglang.srt.plugins.hook_registry:HookType": "AFTER, BEFORE",
}
"""What is read of SGLang's objects: fields, members and attributes."""


_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_CONTROLLER = "sglang.srt.managers.cache_controller"
_HOST = "sglang.srt.mem_cache.pool_host"
HICACHE_SIGNATURES = {
    f"{_STORAGE}:HiCacheStorage.register_mem_pool_host": "self, mem_pool_host",
    f"{_STORAGE}:HiCacheStorage.register_mem_host_pool_v2": "self, host_pool, host_pool_name",
    f"{_STORAGE}:HiCacheStorage.on_host_pools_registered": "self",
    f"{_STORAGE}:HiCacheStorage.batch_exists": "self, keys, extra_info",
    f"{_STORAGE}:HiCacheStorage.batch_get_v1": "self, keys, host_indices, extra_info",
    f"{_STORAGE}:HiCacheStorage.batch_set_v1": "self, keys, host_indices, extra_info",
    f"{_STORAGE}:HiCacheStorage.clear": "self",
    f"{_CONTROLLER}:HiCacheController._page_get_zero_copy": "self, operation, hash_values, host_indices, extra_info",
    f"{_CONTROLLER}:HiCacheController._page_set_zero_copy": "self, hash_values, host_indices, extra_info",
    f"{_HOST}.base:HostKVCache.alloc": "self, need_size",
    f"{_HOST}.base:HostKVCache.free": "self, indices",
    f"{_HOST}.mha:MHATokenToKVPoolHost.get_data_page": "self, index, flat",
    f"{_HOST}.mha:MHATokenToKVPoolHost.set_from_flat_data_page": "self, index, data_page",
    "sglang.srt.runtime_context:get_server_args": "",
}
"""As ``SIGNATURES``, for a storage of HiCache's. Importing these takes longer, and only that storage needs them."""
HICACHE_NAMES = {f"{_STORAGE}:HiCacheStorageConfig": "tp_rank, tp_size, extra_config"}


def check_hicache() -> None:
    """As ``check_sglang``, for a storage of HiCache's as well."""
    check_sglang()
    _refuse(find_differences(HICACHE_SIGNATURES, HICACHE_NAMES))


def check_sglang() -> None:
    """Raise ``PluginError`` when the SGLang in this environment is not a supported one."""
    try:
        version = str(import_module("sglang.version").__version__)
    except ImportError as error:
        raise PluginError(
            f"kvtier-sglang needs SGLang, which can't be imported ({error}): {_INSTALL}"
        ) from error
    if ".".join(version.split(".")[:3]) not in SUPPORTED:
        raise PluginError(
            f"kvtier-sglang supports SGLang {', '.join(SUPPORTED)}, and this is {version}: {_INSTALL}"
        )
    _refuse(find_differences(SIGNATURES, NAMES))


def _refuse(differences: Sequence[str]) -> None:
    if differences:
        raise PluginError(
            f"this SGLang differs from what kvtier-sglang was made for: {'; '.join(differences)}: {_INSTALL}"
        )
