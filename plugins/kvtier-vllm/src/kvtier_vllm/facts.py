"""What a worker tells about its engine, and the namespace that follows.

The worker is the one who knows vLLM's resolved configuration and the shape of the KV; the scheduler, which opens the
tiers, gets these facts from it. Pure: nothing here reads vLLM or the machine.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from kvtier_core.engine import GroupSpec, Namespace


@dataclass(frozen=True, kw_only=True)
class Workers:
    """An engine's workers, how they share its work, and where they run.

    ``hosts`` is what vLLM was told, ``unseen`` the number of workers that nothing shows to be on this host.
    """

    count: int
    tensor: int
    pipeline: int = 1
    prefill_context: int = 1
    decode_context: int = 1
    hosts: int = 1
    unseen: int = 0


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
    ``identity`` is the operator's text for weights that nothing identifies; it counts beside a digest, too.
    ``hash_seed_digest`` is ``None`` where vLLM draws the seed of its block hashes anew each time it starts.
    ``weights_elsewhere`` names the setting that has vLLM load weights from where kvtier does not look,
    ``strange_speculation`` the one by which drafts are more than proposals. ``layout`` says in words how a page is laid
    out.
    """

    model: str
    revision: str | None
    weights_digest: str | None = None
    identity: str | None = None
    weights_elsewhere: str | None
    config_digest: str | None
    kv_dtype: str
    groups: tuple[GroupFacts, ...]
    blocks_per_chunk: int
    layout: str
    has_prefix_caching: bool
    hash_algorithm: str
    hash_seed_digest: str | None
    has_lora: bool
    strange_speculation: str | None
    canonical_layout: bool
    workers: Workers

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
        return cls(groups=groups, workers=Workers(**fields.pop("workers")), **fields)


def make_namespace(facts: EngineFacts) -> Namespace:
    """The namespace of this engine's bytes (C02); rows hold the parts of all workers, one after another."""
    weights = [name for name in (facts.weights_digest, facts.identity) if name is not None]
    is_known = weights and facts.config_digest is not None
    return Namespace(
        model=facts.model,
        revision=facts.revision,
        weights_digest="-".join([*weights, f"config-{facts.config_digest}"]) if is_known else None,
        kv_dtype=facts.kv_dtype,
        tokens_per_block=_tokens_per_hash(facts),
        block_size_factor=facts.blocks_per_chunk,
        groups=_group_specs(facts),
        layout=facts.layout,
        parallel=(("tensor", facts.workers.tensor),),
        hash_algorithm=f"vllm-{facts.hash_algorithm}-{facts.hash_seed_digest or 'random'}",
    )


def _group_specs(facts: EngineFacts) -> tuple[GroupSpec, ...]:
    """The groups by their number in vLLM's keys; those that take no part in prefix caching keep their place."""
    known = {group.group_id: group for group in facts.groups}
    left_out = GroupSpec(layers=("not cached",), block_bytes=0, cacheable=False)
    factor, smallest = facts.blocks_per_chunk * facts.workers.count, _tokens_per_hash(facts)
    return tuple(
        GroupSpec(
            layers=group.layers,
            block_bytes=group.block_bytes * factor,
            tokens_per_block=None if group.tokens_per_block == smallest else group.tokens_per_block,
            window=group.window,
        )
        if (group := known.get(number)) is not None
        else left_out
        for number in range(max(known) + 1)
    )


def _tokens_per_hash(facts: EngineFacts) -> int:
    """The tokens that every group's blocks are whole multiples of."""
    return math.gcd(*(group.tokens_per_block for group in facts.groups))
