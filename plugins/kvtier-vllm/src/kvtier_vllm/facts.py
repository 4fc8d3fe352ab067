"""What the workers tell about their engine, and what follows: the namespace, and where in a row each has its bytes.

A worker knows vLLM's resolved configuration and the shape of its own KV. The workers join what they know, and the
scheduler, which opens the tiers, gets these facts from them. Pure: nothing here reads vLLM or the machine.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from kvtier_core import UnsupportedModelError
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


_SIZES = ("pipeline", "decode_context")
"""How workers share the work, beside tensor parallelism: part of the namespace where there is more than one."""


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """One KV group: its layers, the kinds of their KV in vLLM's words, and the bytes of each worker's device block.

    The *copies* workers that are neighbours hold the same bytes. ``window`` is the number of tokens that its layers
    look back, ``None`` where one of them sees everything. ``uncertain`` is the layer whose bytes may depend on the
    tensor-parallel size, in an engine that is to store none such.
    """

    group_id: int
    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    tokens_per_block: int
    parts: tuple[int, ...]
    copies: int = 1
    window: int | None = None
    uncertain: str | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one device block in a row: what several workers hold alike is there once."""
        return sum(self.parts[:: self.copies])

    def offset(self, worker: int) -> int:
        """Where the part of *worker* begins among them."""
        return sum(self.parts[: worker // self.copies * self.copies : self.copies])


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """All that kvtier has to know of an engine: what one worker sees, or all of them together.

    ``weights_digest`` is ``None`` where nothing identifies the weights, ``config_digest``, which covers what else
    changes the KV of the same weights, where nothing identifies that: nothing is reused across restarts then.
    ``identity`` is the operator's text for weights that nothing identifies; it counts beside a digest, too.
    ``hash_seed_digest`` is ``None`` where vLLM draws the seed of its block hashes anew each time it starts.
    ``weights_elsewhere`` names the setting that has vLLM load weights from where kvtier does not look,
    ``strange_speculation`` the one by which drafts are more than proposals, and ``silent_weights`` the one by which
    weights may change without a call that kvtier sees. ``layers_by_first_table`` is how the names of layers begin whose
    KV vLLM writes by the first group's block table. ``layout`` and ``backends`` say in words how a page is laid out.
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
    backends: tuple[str, ...]
    has_prefix_caching: bool
    hash_algorithm: str
    hash_seed_digest: str | None
    has_lora: bool
    strange_speculation: str | None
    layers_by_first_table: str | None
    silent_weights: str | None
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
            GroupFacts(**{**group, **{name: tuple(group[name]) for name in ("layers", "kinds", "parts")}})
            for group in fields.pop("groups")
        )
        workers, backends = Workers(**fields.pop("workers")), tuple(fields.pop("backends"))
        return cls(groups=groups, workers=workers, backends=backends, **fields)


def join(each: Sequence[EngineFacts]) -> EngineFacts:
    """What all workers see together, from what each sees, by rank: a pipeline's stages have layers of their own.

    Raises ``UnsupportedModelError`` where they have not one configuration.
    """
    first = each[0]
    for rank, other in enumerate(each):
        if _of_engine(other) != _of_engine(first):
            raise UnsupportedModelError(
                f"kvtier can't serve model {first.model!r}: worker {rank} has other facts about the engine than worker "
                "0; start all workers with one configuration"
            )
    stages = each[:: first.workers.tensor]
    return replace(
        first,
        groups=tuple(
            replace(
                group,
                layers=tuple(chain.from_iterable(stage.groups[index].layers for stage in stages)),
                kinds=tuple(chain.from_iterable(stage.groups[index].kinds for stage in stages)),
                parts=tuple(chain.from_iterable(worker.groups[index].parts for worker in each)),
                copies=max(stage.groups[index].copies for stage in stages),
                window=_widest([stage.groups[index] for stage in stages]),
                uncertain=next(filter(None, (worker.groups[index].uncertain for worker in each)), None),
            )
            for index, group in enumerate(first.groups)
        ),
        backends=tuple(sorted(set(chain.from_iterable(stage.backends for stage in stages)))),
    )


def _of_engine(facts: EngineFacts) -> tuple[EngineFacts, list[tuple[int, int]]]:
    """What each worker must see alike."""
    return (
        replace(facts, groups=(), backends=()),
        [(group.group_id, group.tokens_per_block) for group in facts.groups],
    )


def _widest(groups: Sequence[GroupFacts]) -> int | None:
    windows = [group.window for group in groups if group.layers]
    return None if None in windows else max(filter(None, windows))


def make_namespace(facts: EngineFacts) -> Namespace:
    """The namespace of this engine's bytes (C02). In the canonical layout it does not depend on tensor parallelism."""
    sizes = {} if facts.canonical_layout else {"tensor": facts.workers.tensor}
    order = ["canonical"] if facts.canonical_layout else _parts(facts)
    sizes |= {name: size for name, size in asdict(facts.workers).items() if name in _SIZES and size > 1}
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
        layout=" ".join([facts.layout, *facts.backends, *order]),
        parallel=tuple(sizes.items()),
        hash_algorithm=f"vllm-{facts.hash_algorithm}-{facts.hash_seed_digest or 'random'}",
    )


def _parts(facts: EngineFacts) -> list[str]:
    """The parts that rows are made of, in words, where they are not simply one of each worker, all alike."""
    return [
        f"{group.group_id}:{'+'.join(map(str, group.parts[:: group.copies]))}"
        for group in facts.groups
        if group.copies > 1 or len(set(group.parts)) > 1
    ]


def _group_specs(facts: EngineFacts) -> tuple[GroupSpec, ...]:
    """The groups by their number in vLLM's keys; those that take no part in prefix caching keep their place."""
    known = {group.group_id: group for group in facts.groups}
    left_out = GroupSpec(layers=("not cached",), block_bytes=0, cacheable=False)
    factor, smallest = facts.blocks_per_chunk, _tokens_per_hash(facts)
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
