"""A program: what kvtier says to vLLM's configurations, without an engine; one JSON object a line, and one answer.

Everything is vLLM's own but the layers, which here only say what KV they keep. ``{"engine": {...}}`` are vLLM's
options, ``"groups"`` for each KV group the kind of its layer, its block size, and how the layer's name begins if not by
``layer``, ``"connector"`` options of the connector, ``"parallel"`` what vLLM's ParallelConfig gets where a CPU's engine
refuses it before kvtier is asked. Apart from the tests because vLLM sets up its process for good.
"""

import json
import os
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

PLAIN_GROUPS = [["full", 32]]


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM prints; the answers must stay clean
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)


def answer(engine, groups=PLAIN_GROUPS, connector=None, parallel=None):
    """What the spec says to an engine by itself, with a tier that outlives it, and what the bridge says to it."""
    from vllm.config import ParallelConfig, set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    from vllm.engine.arg_utils import EngineArgs

    from kvtier_core import UnsupportedModelError
    from kvtier_vllm.inspection import read_own_facts
    from kvtier_vllm.refusals import check_engine, check_persistence, check_reset

    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KvtierSpec",
            "spec_module_path": "kvtier_vllm",
            **(connector or {}),
        },
    }
    config = EngineArgs(**engine, kv_transfer_config=transfer).create_engine_config()
    if parallel is not None:
        config.parallel_config = ParallelConfig(**parallel)
    kv_cache_config, kv_caches = make_caches(config, groups)
    offloading = build_offloading_config(config, kv_cache_config)

    def said(check, *arguments):
        try:
            check(*arguments)
        except UnsupportedModelError as error:
            return str(error)
        return ""

    with set_current_vllm_config(config):
        facts = read_own_facts(offloading, kv_caches)
    return {
        "engine": said(check_engine, facts),
        "lasting": said(check_persistence, facts, ["disk"]),
        "reset": said(partial(check_reset, keeps_tiers=True), facts),
        "bridge": said(open_tier, offloading),
    }


def make_caches(config, groups):
    """vLLM's description of KV groups, one layer each, and its tensors."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

    specs = [kv_spec(kind, block_size) for kind, block_size, *_ in groups]
    names = [f"{group[2] if len(group) > 2 else 'layer'}.{number}" for number, group in enumerate(groups)]
    layers = {name: layer(spec) for name, spec in zip(names, specs, strict=True)}
    config.compilation_config.static_forward_context.update(layers)
    page = max(spec.page_size_bytes for spec in specs)
    described = KVCacheConfig(
        num_blocks=2,
        kv_cache_tensors=[KVCacheTensor(size=2 * page, layers=names, layer_stride=0, block_stride=page)],
        kv_cache_groups=[KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)],
    )
    tensors = [CanonicalKVCacheTensor(torch.zeros(2, page, dtype=torch.int8), page)]
    return described, CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(0, page)] for _ in specs])


def kv_spec(kind, block_size):
    """One of vLLM's own."""
    import torch
    from vllm.v1 import kv_cache_interface as vllms

    if kind == "state":
        return vllms.MambaSpec(
            block_size=block_size, shapes=((2, 32),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    sizes: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    of_kind = {
        "full": vllms.FullAttentionSpec,
        "latent": vllms.MLAAttentionSpec,
        "window": partial(vllms.SlidingWindowSpec, sliding_window=64),
        "chunks": partial(vllms.ChunkedLocalAttentionSpec, attention_chunk_size=64),
    }
    return of_kind[kind](block_size=block_size, **sizes)


def layer(spec):
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    return SimpleNamespace(get_kv_cache_spec=lambda config: spec, get_attn_backend=lambda: backend)


def open_tier(offloading):
    """The tier behind vLLM's own tiering, on two rows that nobody else has, up to what it refuses."""
    from kvtier_vllm import KvtierTier

    rows = memoryview(bytearray(2 * 4096)).cast("B", (2, 4096))
    settings = {"pool": {"capacity": "1MiB"}}
    tier = KvtierTier(SimpleNamespace(config=offloading), rows, "KvtierTier", kvtier=settings)
    tier.shutdown()


if __name__ == "__main__":
    main()
