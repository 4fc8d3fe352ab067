"""Facts of a plain engine, for tests without vLLM."""

from kvtier_vllm.facts import EngineFacts, GroupFacts, Workers

GROUP = GroupFacts(
    group_id=0,
    layers=("layers.0", "layers.1"),
    kinds=("FullAttentionSpec", "FullAttentionSpec"),
    tokens_per_block=32,
    parts=(8192,),
)
PLAIN = EngineFacts(
    model="toy",
    revision=None,
    weights_digest="w",
    weights_elsewhere=None,
    config_digest="c",
    kv_dtype="bfloat16",
    groups=(GROUP,),
    blocks_per_chunk=1,
    layout="vllm 0.32 cpu LBHNC",
    backends=("CPU_ATTN/amx",),
    has_prefix_caching=True,
    hash_algorithm="sha256",
    hash_seed_digest="s",
    has_lora=False,
    strange_speculation=None,
    layers_by_first_table=None,
    silent_weights=None,
    canonical_layout=False,
    workers=Workers(count=1, tensor=1),
)
