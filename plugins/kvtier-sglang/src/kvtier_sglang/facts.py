"""What kvtier has to know of an SGLang engine, and what follows: a refusal, or the namespace (C02).

Decides which arguments the KV depends on. All count but those that are listed here, those of a later SGLang as well: an
argument too many costs hits, one too few costs right answers. Pure, and names no SGLang type.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtier_core import UnsupportedModelError
from kvtier_core.engine import GroupSpec, Namespace

COUNTED = frozenset({"device", "exec", "memory", "model", "parallel"})
"""SGLang's groups of arguments that may change KV. Others serve, watch, schedule or are refused."""

_LEFT_OUT = frozenset(
    {
        # where the model is from: its files count by what they hold
        "model_path",
        "revision",
        "download_dir",
        "model_checksum",
        # how the same files are read
        "startup_weight_load_mode",
        "weight_loader_disable_mmap",
        "weight_loader_drop_cache_after_load",
        "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads",
        # which process this is, and where the others are
        "base_gpu_id",
        "dist_init_addr",
        "dist_timeout",
        "engine_info_bootstrap_port",
        "gated_launch_port",
        "gpu_id",
        "gpu_id_step",
        "load_balance_method",
        "nccl_port",
        "node_rank",
        "numa_node",
        "use_ray",
        # how it is watched, and what it does with tokens
        "custom_sigquit_handler",
        "gc_threshold",
        "random_seed",
        "sleep_on_idle",
        "soft_watchdog_timeout",
        "watchdog_timeout",
        "watermark_config",
        "watermark_key",
        "watermark_key_b",
        # which caches there are
        "radix_eviction_policy",
        "radix_eviction_policy_config",
        "_radix_eviction_policy_explicitly_set",
        "unified_cache_external_linker_config",
    }
)
"""Arguments of the counted groups that can't change KV."""

_LEFT_OUT_OF_ENVIRONMENT = re.compile(
    r"(^|_)(CACHE_DIR|DEBUG|HOST|IP|LOG|LOGGING|METRICS|PLUGINS|PORT|PROFILER|RANK|RUN_ID|TEST|TIMEOUT|TMP|TRACE)(_|$)"
)
"""Words in the names of variables about other processes and runs, about time and logs."""

_LOADERS_OF_FILES = frozenset(
    {"auto", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "safetensors"}
)
"""SGLang's load formats that read the model's directory and nothing else."""

_ELSEWHERE = (
    "checkpoint_engine_wait_weights_before_ready",
    "custom_weight_loader",
    "decrypted_config_file",
    "delete_ckpt_after_loading",
    "forward_hooks",
    "kt_weight_path",
    "modelexpress_config",
    "modelopt_checkpoint_restore_path",
    "quantization_param_path",
    "rl_quant_profile",
    "trust_remote_code",
)
"""Arguments by which weights, scales or code come from where kvtier does not look, or are gone when it does."""

_ONE = ("pp_size", "dp_size", "attn_cp_size", "dcp_size", "nnodes")
"""Sizes by which SGLang shares the work of an engine among processes, beside tensor parallelism."""

_REFUSED = {
    "enable_lora": "LoRA adapters: SGLang names them to kvtier by their paths, which says nothing of what is in them",
    "lora_paths": "LoRA adapters: SGLang names them to kvtier by their paths, which says nothing of what is in them",
    "speculative_algorithm": "speculative decoding: a drafter's KV lies in pools of its own",
    "dllm_algorithm": "a diffusion language model: its KV depends on the tokens that follow",
    "enable_hisparse": "HiSparse: pages leave the device by a way of their own",
    "enable_unified_memory": "unified memory: one pool of SGLang's for KV and states, which was not tried",
    "enable_linear_replayssm": "ReplaySSM: a state is behind its tokens, and what it lacks is kept elsewhere",
    "enable_linear_replayssm_spec": "ReplaySSM: a state is behind its tokens, and what it lacks is kept elsewhere",
    "enable_pd_role_switch": "disaggregation: it was not tried",
}
"""Arguments, and why kvtier can't serve an engine that has one of them."""

_MHA, _HOST = "MHATokenToKVPool", "MHATokenToKVPoolHost"
_POOLS = frozenset(
    {
        (_MHA, "nhd", _MHA),
        ("SWAKVPool", "nhd", _MHA, _MHA),
        ("HybridLinearKVPool", "nhd", _MHA, "MambaPool"),
        ("SWAKVPool", "nhd", _MHA, _MHA, "MambaPool"),
        *(
            (_HOST, layout, _HOST)
            for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
        ),
    }
)
"""SGLang's KV memory on the device, and HiCache's on the host, with their layouts and the pools of their parts."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """One engine, as its scheduler's process sees it.

    *arguments* are SGLang's, resolved, and *groups* says which group each belongs to. *weights_digest* is ``None``
    where nothing identifies the weights. *kv_pool* is the type of its KV memory, *pools* are those of the parts of it,
    and *kv_parts* these as KV groups. *parts* are versions and processor features that the numbers depend on.
    *has_request_windows*: a prefix may match whose windows are gone. *side_states* are what SGLang keeps beside a
    recurrent layer's state.
    """

    model: str
    weights_digest: str | None
    arguments: Mapping[str, object]
    groups: Mapping[str, str]
    environment: Mapping[str, str]
    parts: Sequence[str]
    kv_pool: str
    pools: Sequence[str]
    kv_layout: str
    kv_dtype: str
    device: str
    is_multimodal: bool
    is_quantized_kv: bool
    has_request_windows: bool
    side_states: Sequence[str]
    rank: int
    num_ranks: int
    tokens_per_page: int
    kv_parts: Sequence[GroupSpec]


def why_weights_are_unknown(arguments: Mapping[str, object]) -> str | None:
    """The argument by which SGLang's weights or code come from where kvtier does not look; ``None`` without one."""
    if (load_format := arguments.get("load_format")) not in _LOADERS_OF_FILES:
        return f"load_format = {load_format!r}"
    if arguments.get("model_loader_extra_config") not in (None, {}, "{}"):
        return "model_loader_extra_config"
    if arguments.get("weight_cache_mode") not in (None, "off"):
        return f"weight_cache_mode = {arguments.get('weight_cache_mode')!r}"
    return next((name for name in _ELSEWHERE if arguments.get(name)), None)


def check_engine(facts: EngineFacts) -> None:
    """Raise ``UnsupportedModelError``, with every reason, when kvtier can't keep this engine's KV."""
    if reasons := list(_objections(facts)):
        raise UnsupportedModelError(
            f"kvtier can't serve model {facts.model!r} in SGLang: {'; '.join(reasons)}"
        )


def _objections(facts: EngineFacts) -> Iterator[str]:
    arguments = facts.arguments
    yield from dict.fromkeys(reason for name, reason in _REFUSED.items() if arguments.get(name))
    if arguments.get("disaggregation_mode") not in (None, "null"):
        yield f"disaggregation_mode = {arguments['disaggregation_mode']!r}: it was not tried"
    for name in _ONE:
        size = arguments.get(name)
        if isinstance(size, int) and size > 1:
            yield f"{name} = {size}: of several processes only those of tensor parallelism were tried"
    if facts.has_request_windows:
        yield "SGLang keeps its windows by request, so that a prefix may be found without them"
    for name in facts.side_states:
        yield f"SGLang keeps {name} beside the states of its layers, which kvtier does not know"
    if facts.is_multimodal:
        yield "it takes images or sound, which SGLang names to kvtier by 30 bits of a digest"
    if (facts.kv_pool, facts.kv_layout, *facts.pools) not in _POOLS:
        pools = " of ".join([facts.kv_pool, " and ".join(facts.pools)])
        yield f"its KV lies in a {pools} with layout {facts.kv_layout!r}, which kvtier does not know"
    if facts.is_quantized_kv:
        yield "its KV has scales beside it, which kvtier does not keep"
    if facts.device != "cpu":
        yield f"its KV is on {facts.device}: only CPUs were tried"


def make_namespace(facts: EngineFacts) -> Namespace:
    """The namespace of this engine's bytes. Raises ``TypeError`` for an argument that nothing tells from others."""
    known = facts.weights_digest is not None
    return Namespace(
        model=facts.model,
        weights_digest=f"{facts.weights_digest}-config-{config_digest(facts)}" if known else None,
        kv_dtype=facts.kv_dtype,
        tokens_per_block=facts.tokens_per_page,
        groups=tuple(facts.kv_parts),
        parallel=(("ranks", facts.num_ranks), ("rank", facts.rank)),
        layout=" ".join([*facts.parts, facts.device, facts.kv_pool, facts.kv_layout]),
        hash_algorithm="sglang-sha256-chain-1",
    )


def config_digest(facts: EngineFacts) -> str:
    """A digest of the arguments and of the variables of SGLang's that KV may depend on."""
    counted = {
        name: _plain(value, name)
        for name, value in facts.arguments.items()
        if facts.groups.get(name, "exec").partition(".")[0] in COUNTED
        and name not in _LEFT_OUT
        and not name.startswith("hicache_")
    }
    variables = {
        name: value for name, value in facts.environment.items() if not _LEFT_OUT_OF_ENVIRONMENT.search(name)
    }
    return hashlib.sha256(json.dumps([counted, variables], sort_keys=True).encode()).hexdigest()[:32]


def _plain(value: object, where: str) -> object:
    """*value* as JSON takes it, the same in every process. Raises ``TypeError`` that says where that can't be."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(item, where), sort_keys=True) for item in value)
    if isinstance(value, Sequence):
        return [_plain(item, where) for item in value]
    if fields := getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None):
        return {name: _plain(getattr(value, name), f"{where}.{name}") for name in fields}
    raise TypeError(
        f"nothing tells the {type(value).__name__} in SGLang's argument {where} from others of its kind"
    )
