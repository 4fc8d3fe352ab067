"""Proves at the start that a block which was read and written again is what the model had computed.

A proof of a block's bytes can't see a build of llama.cpp that takes in other bytes than it wrote down. The logits of
the tokens that follow can, and so can the bytes that it writes down then.
"""

import numpy as np

from kvtier_core import UnsupportedModelError
from kvtier_llamacpp.context import Context

_BLOCKS = 2
_BEHIND = 3
"""Tokens computed behind the blocks."""


def trial_tokens(tokens_per_block: int) -> int:
    """Tokens that a context has to have room for, for ``measure``."""
    return _BLOCKS * tokens_per_block + _BEHIND


def measure(context: Context) -> int:
    """The bytes of every block of this model, after a trial. The context is empty afterwards.

    Raises ``UnsupportedModelError`` where blocks differ in size, or logits behind blocks that were read and written
    again are not bit by bit those from before. Cost: forward passes over two blocks and twice three tokens.
    """
    size = context.tokens_per_block
    tokens = [(7 * number + 1) % context.model.vocab_size for number in range(trial_tokens(size))]
    held, behind = tokens[: _BLOCKS * size], tokens[_BLOCKS * size :]
    try:
        for begin in range(0, len(held), size):
            context.decode(held[begin : begin + size])
        blocks = np.zeros((_BLOCKS, context.measure_block()), np.uint8)
        has_read = all(context.read_block(index, block) for index, block in enumerate(blocks))
        computed = context.decode(behind)
        context.clear()
        has_written = has_read and all(context.write_block(block) for block in blocks)
        again = np.zeros_like(blocks)
        is_same = has_written and all(context.read_block(index, block) for index, block in enumerate(again))
        if not (
            is_same and np.array_equal(blocks, again) and np.array_equal(computed, context.decode(behind))
        ):
            raise UnsupportedModelError(
                f"kvtier can't keep the KV of this model ({context.model.description}): blocks of {size} tokens that "
                "llama.cpp wrote down and took in again are not what it had computed"
            )
    finally:
        context.clear()
    return blocks.shape[1]
