"""Prompts: a request's tokens as blocks of each KV group, with their keys. It knows neither tiers nor the device.

Hashes are made for the namespace's block of tokens; a group of larger blocks takes the hash at each of its blocks'
ends, which covers the whole prefix all the same (C01).
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_core.keys import OffloadKey, RequestIdentity, hash_blocks, make_offload_key


class PromptBlock(NamedTuple):
    """One block: the token it ends at, its group's place among the cached ones, which of the group's it is, its key."""

    end: int
    group: int
    number: int
    key: OffloadKey


class HashedPrompt:
    """The tokens of one request so far."""

    def __init__(
        self,
        identity: RequestIdentity,
        tokens_per_hash: int,
        shapes: Sequence[GroupShape],
        indices: Sequence[int],
    ) -> None:
        """*shapes* are the cached groups', *indices* theirs in the namespace."""
        self.num_tokens = 0
        self.blocks: list[PromptBlock] = []
        """Whole blocks of all groups, in the order of the tokens they end at."""
        self._identity = identity
        self._tokens_per_hash = tokens_per_hash
        self._shapes = shapes
        self._indices = indices
        self._keys: list[list[OffloadKey]] = [[] for _ in shapes]
        self._hashed = 0
        self._last_hash: bytes | None = None
        self._rest: list[int] = []
        """The tokens after the last whole hash."""
        self._loadable: tuple[tuple[OffloadKey, ...], ...] | None = None

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens. Raises ``ValueError`` for what is no token ids; then nothing has changed."""
        size = self._tokens_per_hash
        rest = [*self._rest, *token_ids]
        hashes = hash_blocks(rest, size, self._identity, parent=self._last_hash, first_block=self._hashed)
        self.num_tokens += len(token_ids)
        self._rest = rest[len(hashes) * size :]
        self._loadable = None
        for block_hash in hashes:
            self._hashed += 1
            self._add(self._hashed * size, block_hash)
            self._last_hash = block_hash

    def _add(self, end: int, block_hash: bytes) -> None:
        for group, shape in enumerate(self._shapes):
            if end % shape.tokens_per_block:
                continue
            key = make_offload_key(block_hash, self._indices[group])
            self.blocks.append(PromptBlock(end, group, len(self._keys[group]), key))
            self._keys[group].append(key)

    @property
    def max_loadable(self) -> int:
        """Tokens that may be loaded: one is always left to compute."""
        return max(0, self.num_tokens - 1)

    @property
    def loadable_keys(self) -> tuple[tuple[OffloadKey, ...], ...]:
        """``keys_within(max_loadable)``: the same object until tokens are added."""
        if self._loadable is None:
            self._loadable = self.keys_within(self.max_loadable)
        return self._loadable

    def keys_within(self, num_tokens: int) -> tuple[tuple[OffloadKey, ...], ...]:
        """The keys of each group's blocks within the first *num_tokens* tokens."""
        return tuple(
            tuple(keys[: num_tokens // shape.tokens_per_block])
            for keys, shape in zip(self._keys, self._shapes, strict=True)
        )

    def needed(self, end: int) -> list[PromptBlock]:
        """The blocks that the end point *end* needs, in the order of the tokens they end at."""
        needed = [shape.needed(end) for shape in self._shapes]
        return [
            block for block in self.blocks[: self.count_within(end)] if block.number in needed[block.group]
        ]

    def count_within(self, num_tokens: int) -> int:
        """How many of ``blocks`` end within the first *num_tokens* tokens."""
        return bisect_right(self.blocks, num_tokens, key=_end)


def _end(block: PromptBlock) -> int:
    return block.end
