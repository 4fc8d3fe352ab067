"""What a worker tells about its engine, whether kvtier can keep that engine's KV, and the namespace that follows.

The worker is the one who knows vLLM's resolved configuration and the shape of the KV; the scheduler, which opens the
tiers, gets these facts from it. Pure: nothing here reads vLLM or the machine.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvtier_core import GroupSpec, Namespace, UnsupportedModelError

CRYPTOGRAPHIC_HASHES = ("sha256", "sha256_cbor")
SUPPORTED_KINDS = ("FullAttentionSpec", "SlidingWindowSpec")


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """One KV group: its layers, the kinds of their KV in vLLM's words, and bytes of one worker's device block.

    ``window`` is the number of tokens that its layers look back, ``None`` where one of them sees everything.
    """

    group_id: int
    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    tokens_per_block: int
    block_bytes: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """All that kvtier has to know of an engine; the same from each of its workers.

    ``weights_digest`` is ``None`` where nothing identifies the weights, ``config_digest``, which covers what else
    changes the KV of the same weights, where nothing identifies that: nothing is reused across restarts then.
    ``hash_seed_digest`` is ``None`` where vLLM draws the seed of its block hashes anew each time it starts.
    ``weights_elsewhere`` names the setting that has vLLM load weights from where kvtier does not look. ``layout`` says
    in words how a page is laid out.
    """

    model: str
    revision: str | None
    weights_digest: str | None
    weights_elsewhere: str | None
    config_digest: str | None
    kv_dtype: str
    groups: tuple[GroupFacts, ...]
    blocks_per_chunk: int
    layout: str
    hash_algorithm: str
    hash_seed_digest: str | None
    has_lora: bool
    has_draft_model: bool
    canonical_layout: bool
    num_nodes: int
    num_workers: int
    tensor_parallel: int

    def to_bytes(self) -> bytes:
        """As it travels from process to process."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "EngineFacts":
        """What ``to_bytes`` made."""
        fields: dict[str, Any] = json.loads(data)
        groups = tuple(
            GroupFacts(**{**group, "layers": tuple(group["layers"]), "kinds": tuple(group["kinds"])})
            for group in fields.pop("groups")
        )
        return cls(groups=groups, **fields)


def _objections(facts: EngineFacts) -> Iterator[str]:
    sizes = sorted({group.tokens_per_block for group in facts.groups})
    if len(sizes) > 1:
        yield f"its KV groups have blocks of {' and '.join(map(str, sizes))} tokens, and kvtier needs the same in all"
    for group in facts.groups:
        for kind in sorted(set(group.kinds) - set(SUPPORTED_KINDS)):
            yield f"its layer {group.layers[group.kinds.index(kind)]!r} keeps {kind}, a layout kvtier does not know"
    if facts.blocks_per_chunk > 1 and any(group.window is not None for group in facts.groups):
        yield f"blocks_per_chunk = {facts.blocks_per_chunk} with sliding windows: a window is kept in single blocks"
    if facts.num_workers != facts.tensor_parallel:
        yield (
            f"{facts.num_workers} workers with a tensor parallel size of {facts.tensor_parallel}: pipeline and context "
            "parallelism are not supported"
        )
    if facts.num_nodes > 1:
        yield f"its workers run on {facts.num_nodes} hosts: pool and workers must share one host's memory"
    if facts.canonical_layout:
        yield "canonical_layout is set: kvtier stores the workers' pages as they are"


def check_engine(facts: EngineFacts) -> None:
    """Raise ``UnsupportedModelError``, with every reason, when kvtier can't keep this engine's KV."""
    _refuse(facts, list(_objections(facts)))


def _persistence_objections(facts: EngineFacts, tiers: str) -> Iterator[str]:
    if facts.hash_algorithm not in CRYPTOGRAPHIC_HASHES:
        yield (
            f"prefix_caching_hash_algo = {facts.hash_algorithm!r} is not cryptographic: blocks of other runs in "
            f"{tiers} could be taken for this one's; choose one of {', '.join(CRYPTOGRAPHIC_HASHES)}"
        )
    elif facts.hash_seed_digest is None:
        yield (
            f"vLLM draws the seed of its block hashes anew each time it starts, so {tiers} would never be of use to "
            "another run: set PYTHONHASHSEED"
        )
    if facts.weights_elsewhere is not None:
        yield (
            f"{facts.weights_elsewhere}: kvtier does not see which weights vLLM loads, and {tiers} would serve the KV "
            "of others; load them from the model's own files, or use tiers that end with the engine"
        )
    if facts.has_lora:
        yield (
            f"LoRA is enabled, and vLLM tells adapters apart by name and path alone: {tiers} would serve the KV of an "
            "adapter that was exchanged at its place"
        )
    if facts.has_draft_model:
        yield f"speculative decoding is on, and {tiers} could not tell the KV of one draft model from another's"


def check_persistence(facts: EngineFacts, tiers: Mapping[str, bool]) -> None:
    """Raise ``UnsupportedModelError`` when blocks that outlive the engine could be taken for others.

    *tiers* maps the names of the enabled tiers to whether they keep blocks that other runs or processes see.
    """
    lasting = [name for name, outlives in tiers.items() if outlives]
    if lasting:
        names = f"tier{'s' if len(lasting) > 1 else ''} {', '.join(map(repr, lasting))}"
        _refuse(facts, list(_persistence_objections(facts, names)))


def _refuse(facts: EngineFacts, objections: list[str]) -> None:
    if objections:
        raise UnsupportedModelError(f"kvtier can't serve model {facts.model!r}: {'; '.join(objections)}")


def make_namespace(facts: EngineFacts) -> Namespace:
    """The namespace of this engine's bytes (C02); rows hold the parts of all workers, one after another."""
    digests = (facts.weights_digest, facts.config_digest)
    return Namespace(
        model=facts.model,
        revision=facts.revision,
        weights_digest=None if None in digests else "{}-config-{}".format(*digests),
        kv_dtype=facts.kv_dtype,
        tokens_per_block=facts.groups[0].tokens_per_block,
        block_size_factor=facts.blocks_per_chunk,
        groups=_group_specs(facts),
        layout=facts.layout,
        parallel=(("tensor", facts.tensor_parallel),),
        hash_algorithm=f"vllm-{facts.hash_algorithm}-{facts.hash_seed_digest or 'random'}",
    )


def _group_specs(facts: EngineFacts) -> tuple[GroupSpec, ...]:
    """The groups by their number in vLLM's keys; those that take no part in prefix caching keep their place."""
    known = {group.group_id: group for group in facts.groups}
    left_out = GroupSpec(layers=("not cached",), block_bytes=0, cacheable=False)
    factor = facts.blocks_per_chunk * facts.num_workers
    return tuple(
        GroupSpec(layers=group.layers, block_bytes=group.block_bytes * factor, window=group.window)
        if (group := known.get(number)) is not None
        else left_out
        for number in range(max(known) + 1)
    )
