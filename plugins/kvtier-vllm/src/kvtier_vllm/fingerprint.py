"""A digest of vLLM's resolved configuration: what, beside the weights, makes the KV bytes what they are (C02).

Decides which settings can't change KV. All others count, those of a later vLLM too: a setting too many costs hits, one
too few costs right answers. Pure, and names no vLLM type: it walks whatever dataclasses it is given.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

_log = logging.getLogger("kvtier.vllm")

_LEFT_OUT: Mapping[str, frozenset[str]] = {
    "VllmConfig": frozenset(
        {
            # when something is computed and where weights wait, not what comes out
            "scheduler_config",
            "offload_config",
            # what is watched, logged or sent on
            "observability_config",
            "profiler_config",
            "logging_config",
            "kv_transfer_config",
            "kv_events_config",
            "ec_transfer_config",
            "ec_manager_config",
            "aux_output_config",
            "instance_id",
            "shutdown_timeout",
            # what is done with the logits
            "structured_outputs_config",
            "reasoning_config",
            "watermark_config",
            # an object made of the model's configuration and directory, which count
            "quant_config",
            # what proposes tokens; a drafter that keeps KV has a digest of its own
            "speculative_config",
        }
    ),
    "ModelConfig": frozenset(
        {
            # where the model is from: its weights, code and configuration count by what they are
            "model",
            "model_weights",
            "hf_config_path",
            "hf_overrides",
            "served_model_name",
            "hf_token",
            # how text becomes tokens, and logits become tokens
            "tokenizer",
            "tokenizer_mode",
            "tokenizer_revision",
            "skip_tokenizer_init",
            "generation_config",
            "override_generation_config",
            "logits_processors",
            "max_logprobs",
            "logprobs_mode",
            "return_sampling_mask",
            "use_fp64_gumbel",
            # who may ask, and with how many threads
            "allowed_local_media_path",
            "allowed_media_domains",
            "io_processor_plugin",
            "renderer_num_workers",
        }
    ),
    "CacheConfig": frozenset(
        {
            # how much room there is
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "num_gpu_blocks",
            "num_gpu_blocks_override",
            "num_cpu_blocks",
            "kv_cache_size_tokens",
            "kv_cache_max_concurrency",
            "kv_offloading_size",
            "kv_offloading_backend",
            # said in the namespace by itself, and here by whom it was chosen
            "user_specified_block_size",
            "prefix_caching_hash_algo",
            "enable_prefix_caching",
        }
    ),
    "ParallelConfig": frozenset(
        {
            # which of them this process is
            "rank",
            "node_rank",
            "data_parallel_rank",
            "data_parallel_rank_local",
            "data_parallel_index",
            "data_parallel_size_local",
            "_api_process_count",
            "_api_process_rank",
            # where the others are
            "data_parallel_master_ip",
            "data_parallel_master_port",
            "data_parallel_rpc_port",
            "_data_parallel_master_port_list",
            "_coord_store_port",
            "master_addr",
            "master_port",
            "ray_runtime_env",
            "ray_workers_use_nsight",
            "placement_group",
            "numa_bind",
            "numa_bind_nodes",
            "numa_bind_cpus",
            "assigned_physical_gpu_ids",
            # said in the namespace by themselves, where bytes depend on them
            "tensor_parallel_size",
            "world_size",
            # how processes are started and how long they may take
            "distributed_executor_backend",
            "max_parallel_loading_workers",
            "distributed_timeout_seconds",
            "cpu_distributed_timeout_seconds",
            "disable_nccl_for_dp_synchronization",
            "enable_fault_tolerance",
            "fault_tolerance_config",
        }
    ),
    "SpeculativeConfig": frozenset(
        {
            # where the drafter is from, and for whom it works
            "model",
            "target_model_config",
            "target_parallel_config",
            "draft_parallel_config",
            # said in the namespace by the bytes of a block
            "draft_tensor_parallel_size",
            # how much it proposes, and what becomes of that
            "num_speculative_tokens",
            "num_speculative_tokens_per_batch_size",
            "rejection_sample_method",
            "draft_sample_method",
            "disable_eagle_block_drop",
        }
    ),
    "LoadConfig": frozenset(
        {
            # how the same files are read
            "download_dir",
            "safetensors_load_strategy",
            "safetensors_prefetch_num_threads",
            "safetensors_prefetch_block_size",
            "use_tqdm_on_load",
        }
    ),
    "PassConfig": frozenset(
        {
            # by which kernel workers add up what each computed: vLLM sets it by their number
            "fuse_allreduce_rms",
        }
    ),
    "CompilationConfig": frozenset(
        {
            # what compiling has made so far, and where it keeps that
            "static_forward_context",
            "static_all_moe_layers",
            "enabled_custom_ops",
            "disabled_custom_ops",
            "traced_files",
            "compilation_time",
            "encoder_compilation_time",
            "inductor_compile_config",
            "inductor_passes",
            "debug_dump_path",
            "cache_dir",
            "local_cache_dir",
            "compile_cache_save_format",
            # for which sizes of batches
            "compile_sizes",
            "compile_ranges_endpoints",
            "cudagraph_capture_sizes",
            "max_cudagraph_capture_size",
            "cudagraph_num_of_warmups",
        }
    ),
}
"""Fields that can't change KV, by the class that has them."""

_LEFT_OUT_OF_ENVIRONMENT = re.compile(
    r"(^|_)(HOST|HOSTNAME|IP|IPS|PORT|RANK|LOCAL|RAY|MULTIPROC|MULTIPROCESSING|SERIALIZATION|TIMEOUT|OMP|RESERVED|LOG|"
    r"LOGGING|DEBUG|PROFILING|BUILD|URL|PREFIX)(_|$)"
)
"""Words in the names of variables about other processes, about time, processor cores and logs."""

_LEFT_OUT_OF_MODELS = frozenset({"_name_or_path", "transformers_version"})
"""Parts of a transformers configuration that say where it is from, at any depth."""


def config_digest(config: object, environment: Mapping[str, object]) -> str | None:
    """A digest of *config* and of vLLM's variables in *environment*.

    ``None`` where one holds a value that nothing tells from others, which is logged. It stands for unknown: nothing
    may be reused by another run.
    """
    variables = {
        name: value for name, value in environment.items() if not _LEFT_OUT_OF_ENVIRONMENT.search(name)
    }
    try:
        plain = [_plain(config, type(config).__name__), _plain(variables, "the environment")]
    except TypeError as error:
        _log.warning("no other run will reuse this one's blocks: %s", error)
        return None
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


def _plain(value: object, where: str) -> object:
    """*value* as JSON takes it, the same in every process. Raises ``TypeError`` that says where that can't be."""
    if isinstance(value, Enum):
        return [_name(type(value)), _plain(value.value, where)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, type):
        return _name(value)
    if isinstance(value, Path) or _name(type(value)) in ("torch.dtype", "torch.device"):
        return str(value)
    return _plain_parts(value, where)


def _plain_parts(value: object, where: str) -> object:
    if callable(to_dict := getattr(value, "to_dict", None)):
        return [_name(type(value)), _without_origin(_plain(to_dict(), where))]
    if is_dataclass(value):
        return [_name(type(value)), dict(_fields(value, where))]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(json.dumps(_plain(item, where), sort_keys=True) for item in value)
    if isinstance(value, Sequence):
        return [_plain(item, where) for item in value]
    raise TypeError(f"nothing tells the {type(value).__name__} in {where} from others of its kind")


def _fields(config: object, where: str) -> Iterator[tuple[str, object]]:
    left_out = _LEFT_OUT.get(type(config).__name__, frozenset())
    for field in fields(config):  # type: ignore[arg-type]
        if field.name not in left_out:
            yield field.name, _plain(getattr(config, field.name, None), f"{where}.{field.name}")


def _without_origin(settings: object) -> object:
    if isinstance(settings, dict):
        return {k: _without_origin(v) for k, v in settings.items() if k not in _LEFT_OUT_OF_MODELS}
    return [_without_origin(item) for item in settings] if isinstance(settings, list) else settings


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
