"""The blocks and the state of one prompt in our memory, on their way between llama.cpp and the pool.

llama.cpp keeps both to itself. Of the state there is one copy, that behind some whole block: a prompt needs no other
than the one at its end.
"""

from collections.abc import Mapping, Sequence

import torch

from kvtier_core.engine import GroupSpec
from kvtier_core.transfer import KVLayout
from kvtier_llamacpp.canary import Sizes
from kvtier_llamacpp.context import Memory

_MOST_PARTS = 16
"""Rows of the pool that a state is spread over at most. Each is one key more to look up for every block of a prompt."""
_KEPT = 0
"""The state's only block of memory."""
_NOT_KEPT = -1


class Copies:
    """Memory for *num_blocks* blocks and a state. The pool's copies read and write it as the session says.

    A row of the pool has one size. So a state that is larger than a block is cut into parts, each a KV group of its own
    with a window of one token: only the last is needed.
    """

    def __init__(self, context: Memory, num_blocks: int, sizes: Sizes) -> None:
        self._context = context
        self._blocks = torch.zeros((num_blocks, sizes.block), dtype=torch.uint8)
        num_parts = min(_MOST_PARTS, -(-sizes.state // (sizes.block or sizes.state))) if sizes.state else 0
        self._state = torch.zeros((num_parts, -(-sizes.state // max(1, num_parts))), dtype=torch.uint8)
        self._state_bytes = self._state.numpy().reshape(-1)[: sizes.state]
        self._has_kv = sizes.block > 0
        self._num_blocks = 0
        """Blocks of the prompt that are in our memory."""
        self._state_end: int | None = None
        """Blocks before the state that is in our memory."""

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """What the namespace says of the blocks and the state."""
        of_blocks = GroupSpec(layers=("llama.cpp sequence state",), block_bytes=self._blocks.shape[1])
        parts, size = self._state.shape
        of_state = (
            GroupSpec(layers=(f"llama.cpp recurrent state {part}",), block_bytes=size, window=1)
            for part in range(parts)
        )
        return (*([of_blocks] if self._has_kv else []), *of_state)

    @property
    def layout(self) -> KVLayout:
        """The memory as the pool's copies see it: the groups, in their order."""
        parts = [[self._state[part : part + 1]] for part in range(len(self._state))]
        return KVLayout(*([[self._blocks]] if self._has_kv else []), *parts)

    def keep(self, num_blocks: int) -> None:
        """Forget all but the first *num_blocks* blocks."""
        self._num_blocks, self._state_end = min(self._num_blocks, num_blocks), None

    def read_blocks(self) -> int:
        """Read the blocks that are new out of llama.cpp. How many of the prompt are in our memory now."""
        rows = self._blocks.numpy()
        complete = self._context.num_tokens // self._context.tokens_per_block
        while self._num_blocks < complete and (
            not self._has_kv or self._context.read_block(self._num_blocks, rows[self._num_blocks])
        ):
            self._num_blocks += 1
        return self._num_blocks

    @property
    def is_behind_a_block(self) -> bool:
        """Whether there is a state in llama.cpp that belongs to the end of a block."""
        return self._state_bytes.size > 0 and self._context.num_tokens % self._context.tokens_per_block == 0

    def read_state(self) -> None:
        """Read the state out of llama.cpp, over the one that was here: nothing copies that one any more."""
        has_read = self._context.read_state(self._state_bytes)
        self._state_end = self._context.num_tokens // self._context.tokens_per_block if has_read else None

    def write(self, num_blocks: int) -> bool:
        """Write the first *num_blocks* blocks and the state, as they were loaded. Whether llama.cpp took them."""
        blocks = self._blocks.numpy()[:num_blocks]
        if num_blocks and not self._context.restore(blocks, self._state_bytes):
            return False
        self._num_blocks, self._state_end = num_blocks, num_blocks
        return True

    def to_load(self, num_blocks: int) -> Mapping[int, Sequence[int]]:
        """Where the first *num_blocks* blocks and the state behind them are loaded to, by KV group."""
        return self._places(num_blocks, [_KEPT] * num_blocks)

    def to_store(self) -> Mapping[int, Sequence[int]]:
        """Where the blocks are that are in our memory, and the state, by KV group."""
        of_state = [_NOT_KEPT] * self._num_blocks
        if self._state_end is not None and 0 < self._state_end <= self._num_blocks:
            of_state[self._state_end - 1] = _KEPT
        return self._places(self._num_blocks, of_state)

    def _places(self, num_blocks: int, of_state: Sequence[int]) -> Mapping[int, Sequence[int]]:
        of_blocks: list[Sequence[int]] = [range(num_blocks)] if self._has_kv else []
        return dict(enumerate([*of_blocks, *([of_state] * len(self._state))]))
