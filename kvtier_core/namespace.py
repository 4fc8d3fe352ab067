"""Namespaces (contract C02): a fingerprint of everything that makes an engine's KV bytes interchangeable.

A namespace never guesses: an unknown weights digest is replaced by a random one, so that nothing is reused across
restarts.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

from kvtier_core.keys import HASH_ALGORITHM
from kvtier_core.proof import FORMAT_VERSION

_UNKNOWN = "unknown-"
"""The random digest of unknown weights begins with this."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One KV group: which layers share a block table, how large a block of it is, and what of it a prompt needs."""

    layers: tuple[str, ...]
    block_bytes: int
    """Payload bytes of one offloaded block, all layers of the group."""
    tokens_per_block: int | None = None
    """Tokens in a device block of this group, a multiple of the namespace's; ``None`` for just that many."""
    window: int | None = None
    """How many tokens before the next one its layers look at (a sliding window); ``None`` for all of them."""
    cacheable: bool = True
    """Whether it takes part in prefix caching. One that does not has no keys and no rows, whatever its block size."""


_GROUP_DEFAULTS = {item.name: item.default for item in fields(GroupSpec) if item.default is not MISSING}


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """An engine's declaration of its KV bytes. ``name`` is the fingerprint that tiers keep apart.

    ``kv_dtype`` is the resolved dtype (``"float16"``), never ``"auto"``. ``weights_digest=None`` means unknown: a
    random value takes its place. ``parallel`` holds sizes and rank where the bytes depend on them. ``epoch`` is the
    cache epoch (C34), empty until the first reset.
    """

    model: str
    kv_dtype: str
    tokens_per_block: int
    groups: tuple[GroupSpec, ...]
    layout: str
    revision: str | None = None
    weights_digest: str | None = None
    block_size_factor: int = 1
    parallel: tuple[tuple[str, int], ...] = ()
    hash_algorithm: str = HASH_ALGORITHM
    format_version: int = FORMAT_VERSION
    epoch: str = ""

    def __post_init__(self) -> None:
        if self.kv_dtype in ("", "auto"):
            raise ValueError(
                f"kv_dtype must be the resolved dtype, such as 'bfloat16', not {self.kv_dtype!r}"
            )
        if self.weights_digest is None:
            object.__setattr__(self, "weights_digest", f"{_UNKNOWN}{secrets.token_hex(16)}")
        for group in self.groups:
            self._check_group(group)
        if not any(group.cacheable for group in self.groups):
            raise ValueError("no KV group takes part in prefix caching: there is nothing to store")

    def _check_group(self, group: GroupSpec) -> None:
        tokens = group.tokens_per_block
        if group.cacheable and tokens is not None and (tokens < 1 or tokens % self.tokens_per_block):
            raise ValueError(
                f"the KV group of layer {group.layers[0]!r} has blocks of {tokens} tokens, which is no multiple of "
                f"tokens_per_block = {self.tokens_per_block}: block hashes are made for that many tokens at a time"
            )
        if group.window is not None and group.window < 0:
            raise ValueError(
                f"the KV group of layer {group.layers[0]!r} has a window of {group.window} tokens"
            )

    @property
    def cached_groups(self) -> dict[int, GroupSpec]:
        """The groups that take part in prefix caching, by their index."""
        return {index: group for index, group in enumerate(self.groups) if group.cacheable}

    def tokens_of(self, group: GroupSpec) -> int:
        """Tokens in an offloaded block of *group*."""
        return (group.tokens_per_block or self.tokens_per_block) * self.block_size_factor

    @property
    def name(self) -> str:
        """A directory-safe name: a readable part and the first 32 hex digits of a SHA-256 over all fields."""
        described = asdict(self)
        for group in described["groups"]:
            for name, default in _GROUP_DEFAULTS.items():
                if group[name] == default:
                    del group[name]  # so that a new field changes no name by its default
        canonical = json.dumps(described, sort_keys=True, separators=(",", ":"))
        readable = re.sub(r"[^a-z0-9]+", "-", self.model.lower()).strip("-")[-40:].strip("-") or "model"
        return f"{readable}-{hashlib.sha256(canonical.encode()).hexdigest()[:32]}"

    def describe(self) -> Mapping[str, Any]:
        """The readable description that a persistent tier keeps with its data."""
        return asdict(self)

    def next_epoch(self) -> "Namespace":
        """The same namespace in a new cache epoch that no other process has or will have."""
        return replace(self, epoch=secrets.token_hex(16))


def payload_sizes(groups: Sequence[GroupSpec]) -> tuple[int, ...]:
    """Payload bytes of a block, by group index."""
    return tuple(group.block_bytes for group in groups)


def is_of_one_process(description: Mapping[str, Any]) -> bool:
    """Whether no other process has or will have the namespace described so (``TierContext.description``).

    For example one of unknown weights, or of a cache epoch after a reset. What it holds is of no use once its tier is
    closed.
    """
    return bool(description.get("epoch")) or str(description.get("weights_digest")).startswith(_UNKNOWN)
