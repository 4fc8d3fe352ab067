"""Reads vLLM's resolved configuration in a worker and says it as ``EngineFacts``.

Decides which of vLLM's settings the KV depends on. It decides nothing about what is supported.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from vllm import __version__ as vllm_version
from vllm.config import ParallelConfig, VllmConfig, get_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator, get_pp_group, get_tp_group
from vllm.envs import compile_factors
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig

from kvtier_core import UnsupportedModelError
from kvtier_vllm.canonical import fill_a_slot, find_fragments, find_uncertain
from kvtier_vllm.facts import EngineFacts, GroupFacts, Workers, join
from kvtier_vllm.fingerprint import config_digest
from kvtier_vllm.origin import (
    commit_of,
    own_name,
    silent_weights,
    weights_digest,
    weights_elsewhere,
)
from kvtier_vllm.speculation import drafter_of, layers_by_first_table, strange_speculation
from kvtier_weights import process_began_ns

_T = TypeVar("_T")


def read_facts(config: OffloadingConfig, kv_caches: CanonicalKVCaches) -> EngineFacts:
    """The facts of the engine whose workers all call this, while vLLM registers its KV caches.

    Its weights are unknown as yet. Raises ``UnsupportedModelError`` in all of them when a layer can't be found, or they
    have not one configuration.
    """
    found: EngineFacts | UnsupportedModelError
    try:
        found = read_own_facts(config, kv_caches)
    except UnsupportedModelError as error:  # the others would wait for ever
        found = error
    facts = join(_tell_each_other(found, UnsupportedModelError))
    if facts.canonical_layout:
        _check_slots(facts, kv_caches)
    return facts


def read_own_facts(config: OffloadingConfig, kv_caches: CanonicalKVCaches) -> EngineFacts:
    """What the worker that calls sees. Raises ``UnsupportedModelError`` when a layer can't be found."""
    vllm_config = get_current_vllm_config()
    cache = vllm_config.cache_config
    model = vllm_config.model_config
    return EngineFacts(
        model=own_name(model.model),
        revision=commit_of(model.revision) or model.revision,
        weights_elsewhere=next(
            filter(None, (weights_elsewhere(*each) for each in _models(vllm_config))), None
        ),
        config_digest=read_config_digest(vllm_config),
        kv_dtype=config.model.dtype,
        groups=tuple(
            _group(vllm_config, group, kv_caches, index, is_canonical=config.canonical_layout)
            for index, group in enumerate(config.groups)
        ),
        blocks_per_chunk=config.cache.blocks_per_chunk,
        layout=_layout(config),
        backends=_backends(vllm_config, config),
        has_prefix_caching=cache.enable_prefix_caching,
        hash_algorithm=cache.prefix_caching_hash_algo,
        hash_seed_digest=_hash_seed_digest(cache.prefix_caching_hash_algo),
        has_lora=vllm_config.lora_config is not None,
        strange_speculation=strange_speculation(vllm_config.speculative_config),
        layers_by_first_table=layers_by_first_table(vllm_config),
        silent_weights=silent_weights(vllm_config.weight_transfer_config),
        canonical_layout=config.canonical_layout,
        workers=read_workers(vllm_config.parallel_config),
    )


def read_weights_digest(*, edges: bool) -> str | None:
    """What identifies the weights of the engine whose workers all call this; ``None`` where nothing does.

    Those of a drafter that keeps KV count as well. The first worker reads them and tells the others, which wait. Raises
    ``OSError`` in all of them when a file can't be read. Costs the first as ``digest_weights``, of which *edges* is
    said.
    """
    vllm_config = get_current_vllm_config()
    found: str | OSError | None = None
    if get_tp_group().is_first_rank and get_pp_group().is_first_rank:
        try:
            began = process_began_ns()  # nothing was loaded before
            models = _models(vllm_config)
            found = _join(weights_digest(*each, edges=edges, since_ns=began) for each in models)
        except OSError as error:  # the others would wait for ever
            found = error
    return _tell_each_other(found, OSError)[0]


def _tell_each_other(found: _T | Exception, errors: type[Exception]) -> list[_T]:
    """What each worker of the engine has found, by rank. Raises in all of them what one has found of *errors*."""
    of_stage: list[Any] = _gather(get_tp_group(), found)
    everybodys = [item for stage in _gather(get_pp_group(), of_stage) for item in stage]
    for item in everybodys:
        if isinstance(item, errors):
            raise item
    return everybodys


def _gather(group: GroupCoordinator, item: Any) -> list[Any]:
    items = [None] * group.world_size
    torch.distributed.all_gather_object(items, item, group=group.cpu_group)
    return items


def _check_slots(facts: EngineFacts, kv_caches: CanonicalKVCaches) -> None:
    """Raise ``UnsupportedModelError``, in all workers, where their bytes do not fill the slots of a group."""
    certain = [index for index, group in enumerate(facts.groups) if group.uncertain is None]
    refs = kv_caches.group_data_refs
    own = [[(each.place, each.size) for each in find_fragments(refs[index])] for index in certain]
    for index, *each in zip(certain, *_tell_each_other(own, UnsupportedModelError), strict=True):
        group = facts.groups[index]
        if not fill_a_slot(each, group.copies, group.block_bytes):
            raise UnsupportedModelError(
                f"kvtier can't serve model {facts.model!r} with canonical_layout: what the workers keep of the layers "
                f"from {group.layers[0]!r} on does not fill a block; leave canonical_layout out"
            )


def _models(vllm_config: VllmConfig) -> list[tuple[Any, Any]]:
    """Each model that has KV in the engine's blocks, and how it is loaded: the target, then the drafter."""
    speculative, load = vllm_config.speculative_config, vllm_config.load_config
    models = [(vllm_config.model_config, load)]
    if (drafter := drafter_of(speculative)) is not None:
        models.append((drafter, speculative.draft_load_config or load))
    return models


def read_config_digest(vllm_config: VllmConfig) -> str | None:
    """What stands for all that changes the KV of the same weights; ``None`` where nothing does."""
    digests = [config_digest(vllm_config, compile_factors())]
    if drafter_of(vllm_config.speculative_config) is not None:
        digests.append(config_digest(vllm_config.speculative_config, {}))
    return _join(digests)


def _join(digests: Iterable[str | None]) -> str | None:
    """All of them as one; ``None`` where one is unknown."""
    known = list(digests)
    return None if None in known else "-drafter-".join(filter(None, known))


def read_workers(parallel: ParallelConfig) -> Workers:
    """The workers of one engine; of those that data parallelism adds, each engine has its own."""
    return Workers(
        count=parallel.world_size,
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        prefill_context=parallel.prefill_context_parallel_size,
        decode_context=parallel.decode_context_parallel_size,
        hosts=parallel.nnodes_within_dp,
    )


def _layers(vllm_config: VllmConfig, names: Sequence[str]) -> list[Any]:
    known = vllm_config.compilation_config.static_forward_context
    missing = [name for name in names if name not in known]
    if missing:
        raise UnsupportedModelError(
            f"kvtier can't serve model {vllm_config.model_config.model!r}: it does not know what its layer "
            f"{missing[0]!r} keeps"
        )
    return [known[name] for name in names]


def _group(
    vllm_config: VllmConfig,
    group: OffloadingGroupConfig,
    kv_caches: CanonicalKVCaches,
    index: int,
    *,
    is_canonical: bool = False,
) -> GroupFacts:
    specs = [layer.get_kv_cache_spec(vllm_config) for layer in _layers(vllm_config, group.layer_names)]
    parallel = vllm_config.parallel_config
    refs = kv_caches.group_data_refs[index]
    # Each worker of a stage keeps the whole latent, unless its tokens are spread over them.
    is_alike = bool(specs) and all(type(spec) is MLAAttentionSpec for spec in specs)
    has_all_tokens = parallel.decode_context_parallel_size == 1
    copies = parallel.tensor_parallel_size if is_alike and has_all_tokens else 1
    return GroupFacts(
        group_id=group.group_id,
        layers=group.layer_names,
        kinds=tuple(type(spec).__name__ for spec in specs),
        tokens_per_block=group.tokens_per_block,
        parts=(sum(ref.page_size_bytes for ref in refs),),
        copies=copies,
        window=_window(vllm_config, specs),
        uncertain=find_uncertain(refs, group.layer_names, copies, parallel.rank) if is_canonical else None,
    )


def _window(vllm_config: VllmConfig, specs: Sequence[Any]) -> int | None:
    """How many tokens a group's layers look back; ``None`` where one sees all, or vLLM treats them as if it did.

    Of states only the one after the last token counts.
    """
    if all(isinstance(spec, MambaSpec) for spec in specs):
        return 1
    windows = [getattr(spec, "sliding_window", None) for spec in specs]
    if None in windows or vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return None
    # One token of the window is the one being computed, but for what is kept beyond it.
    return max(
        max(spec.sliding_window, spec.sliding_window - 1 + spec.extra_retained_tokens) for spec in specs
    )


def _layout(config: OffloadingConfig) -> str:
    """How pages are laid out, but for what the layers' backends say."""
    release = ".".join(vllm_version.split(".")[:2])
    return f"vllm {release} {current_platform.device_type} {config.kv_cache_layout}"


def _backends(vllm_config: VllmConfig, config: OffloadingConfig) -> tuple[str, ...]:
    """Of the layers: the attention backends and, on a CPU, their instruction sets."""
    names = [name for group in config.groups for name in group.layer_names]
    layers = _layers(vllm_config, names)
    return tuple(
        sorted({f"{layer.get_attn_backend().get_name()}/{getattr(layer, 'isa', '-')}" for layer in layers})
    )


def _hash_seed_digest(algorithm: str) -> str | None:
    """Stands for the seed of vLLM's block hashes; ``None`` for a random one, which every call draws anew."""
    seed, again = (resolve_none_hash_seed(get_hash_fn_by_name(algorithm)) for _ in range(2))
    return hashlib.sha256(seed.encode()).hexdigest()[:16] if seed == again else None
