"""The tokens that are asked, and where they are cut. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

_BEHIND = (2, 5)
"""Tokens behind the last block's end."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text, cut at several lengths."""

    token_ids: Sequence[int]
    tokens_per_block: int
    cuts: Sequence[int]
    """Lengths of the prompts, ascending."""

    def prompt(self, cut: int) -> Sequence[int]:
        """The first *cut* tokens."""
        return self.token_ids[:cut]

    def restorable(self, cut: int) -> int:
        """The tokens of that prompt that can be restored: whole blocks, and one token is always computed."""
        return (cut - 1) // self.tokens_per_block * self.tokens_per_block

    def with_other_block(self, cut: int) -> Sequence[int]:
        """That prompt with other tokens in the last block that can be restored: what wrong KV would look like."""
        end = self.restorable(cut)
        begin = end - self.tokens_per_block
        return [*self.token_ids[:begin], *reversed(self.token_ids[begin:end]), *self.token_ids[end:cut]]


def least_tokens(tokens_per_block: int) -> int:
    """The shortest document: two blocks, and the tokens behind."""
    return 2 * tokens_per_block + max(_BEHIND)


def make_document(num_tokens: int, tokens_per_block: int, vocab_size: int) -> Document:
    """A document of at most *num_tokens*: whole blocks, and a few tokens behind the last one. Always the same.

    The tokens are random, and come again after a quarter of the text, so that a model that can copy has to look back.
    """
    blocks = (num_tokens - max(_BEHIND)) // tokens_per_block
    length = blocks * tokens_per_block + max(_BEHIND)
    rng = random.Random(num_tokens)  # noqa: S311 - no secret
    period = length // 4 + 1
    words = [rng.randrange(1, vocab_size) for _ in range(period)]
    ends = [block * tokens_per_block for block in (1, 2, blocks // 2, blocks)]
    cuts = {end + more for end in ends for more in (-1, 0, 1)} | {ends[-1] + more for more in _BEHIND}
    return Document(
        token_ids=[words[index % period] for index in range(length)],
        tokens_per_block=tokens_per_block,
        cuts=sorted(cut for cut in cuts if cut > 0),
    )
