"""Proves at the start that what was read and written again is what the model had computed.

A proof of a block's bytes can't see a build of llama.cpp that takes in other bytes than it wrote down. The logits of
the tokens that follow can, and so can the bytes that it writes down then.
"""

from typing import NamedTuple

import numpy as np

from kvtier_core import UnsupportedModelError
from kvtier_llamacpp.context import Bytes, Memory

_BLOCKS = 2
_BEHIND = 3
"""Tokens computed behind the blocks."""


class Sizes(NamedTuple):
    """Bytes of a block and of a state; 0 for what the model does not have."""

    block: int
    state: int


def trial_tokens(tokens_per_block: int) -> int:
    """Tokens that a context has to have room for, for ``measure``."""
    return _BLOCKS * tokens_per_block + _BEHIND


def measure(context: Memory) -> Sizes:
    """The bytes of every block and every state of this model, after a trial. The context is empty afterwards.

    Raises ``UnsupportedModelError`` where blocks or states differ in size, or logits behind those that were read and
    written again are not bit by bit those from before. Cost: forward passes over two blocks and twice three tokens.
    """
    size = context.tokens_per_block
    tokens = [(7 * number + 1) % context.model.vocab_size for number in range(trial_tokens(size))]
    held, behind = tokens[: _BLOCKS * size], tokens[_BLOCKS * size :]
    try:
        context.decode(held[:size])
        sizes = Sizes(context.measure_block(), context.measure_state())
        context.decode(held[size:])
        computed = _read(context, sizes)
        logits = context.decode(behind)
        context.clear()
        written = computed is not None and context.restore(*computed)
        again = _read(context, sizes) if written else None
        is_same = (
            computed is not None
            and again is not None
            and all(map(np.array_equal, computed, again))
            and np.array_equal(logits, context.decode(behind))
        )
        if not is_same:
            raise UnsupportedModelError(
                f"kvtier can't keep what this model computes ({context.model.description}): blocks of {size} tokens, "
                "or the state behind them, that llama.cpp wrote down and took in again are not what it had computed"
            )
    finally:
        context.clear()
    return sizes


def _read(context: Memory, sizes: Sizes) -> tuple[Bytes, Bytes] | None:
    """The blocks and the state, or ``None`` where one has another size."""
    blocks, state = np.zeros((_BLOCKS, sizes.block), np.uint8), np.zeros(sizes.state, np.uint8)
    has_blocks = all(context.read_block(index, block) for index, block in enumerate(blocks) if sizes.block)
    has_state = not sizes.state or context.read_state(state)
    return (blocks, state) if has_blocks and has_state else None
