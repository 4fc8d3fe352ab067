"""Reads a batch as transformers has it: prompts of several lengths in one matrix, with padding that a mask hides.

Decides in which columns of the matrix each prompt stands. Holds no KV.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier_transformers.errors import CacheError

TokenIds = torch.Tensor | Sequence[int]
"""One sequence, or as a tensor ``(sequences, columns)`` a batch."""


@dataclass(frozen=True, kw_only=True)
class BatchedPrompt:
    """One prompt of a batch: it stands in the columns from *begin* on, and before *end* where padding follows.

    Where none follows, its sequence goes on with what is generated.
    """

    token_ids: tuple[int, ...]
    begin: int = 0
    end: int | None = None

    def count_within(self, columns: int) -> int:
        """How many tokens of its sequence stand in the first *columns*."""
        return max(0, (columns if self.end is None else min(columns, self.end)) - self.begin)


def flat_ids(ids: TokenIds) -> Sequence[int]:
    """Token *ids* without the dimension of a batch. Raises ``CacheError`` for a batch of several."""
    matrix = read_matrix(ids)
    if len(matrix) != 1:
        raise CacheError(
            f"a batch of {len(matrix)} prompts: generate completes one; give the batch to cache_for"
        )
    return matrix[0]


def read_matrix(ids: TokenIds) -> list[Sequence[int]]:
    """The columns of each sequence. Raises ``CacheError`` for a tensor of more than two dimensions."""
    if not isinstance(ids, torch.Tensor):
        return [ids]
    if ids.dim() > 2:  # noqa: PLR2004 - sequences, columns
        raise CacheError(f"token ids of shape {tuple(ids.shape)}: give (sequences, columns)")
    matrix: list[Sequence[int]] = (ids if ids.dim() > 1 else ids.reshape(1, -1)).tolist()
    return matrix


def read_batch(ids: TokenIds, attention_mask: torch.Tensor | None) -> list[BatchedPrompt]:
    """The prompts in *ids*. *attention_mask* is 0 where a column is padding; unset, none is.

    Raises ``CacheError`` when the mask has another shape, or hides a column between two that it shows.
    """
    matrix = read_matrix(ids)
    width = len(matrix[0])
    if attention_mask is None:
        return [BatchedPrompt(token_ids=tuple(columns)) for columns in matrix]
    shown = attention_mask.cpu() != 0
    if shown.dim() == 1:
        shown = shown[None]
    if shown.shape != (len(matrix), width):
        raise CacheError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, and the token ids {(len(matrix), width)}"
        )
    return [
        _read_prompt(number, columns, row.nonzero().reshape(-1).tolist())
        for number, (columns, row) in enumerate(zip(matrix, shown, strict=True))
    ]


def _read_prompt(number: int, columns: Sequence[int], shown: Sequence[int]) -> BatchedPrompt:
    begin, end = (shown[0], shown[-1] + 1) if shown else (0, 0)
    if len(shown) != end - begin:
        raise CacheError(
            f"attention_mask hides tokens in the middle of prompt {number}: only padding before and behind a prompt "
            "can be told from its tokens"
        )
    return BatchedPrompt(
        token_ids=tuple(columns[begin:end]), begin=begin, end=end if end < len(columns) else None
    )


def is_plain(prompts: Sequence[BatchedPrompt]) -> bool:
    """Whether there is one prompt, without padding."""
    return len(prompts) == 1 and prompts[0].begin == 0 and prompts[0].end is None
