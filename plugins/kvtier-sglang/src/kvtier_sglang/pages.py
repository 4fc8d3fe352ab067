"""SGLang's KV memory as pages, and its lists of token slots as page numbers. Imports torch alone."""

from collections.abc import Sequence

import torch

from kvtier_core.transfer import KVLayout


def as_pages(buffers: Sequence[torch.Tensor], tokens_per_page: int) -> Sequence[torch.Tensor]:
    """The pages of *buffers*, each ``(slots, ...)`` with a token a slot: K of every layer, then V of every layer.

    Raises ``ValueError`` for a buffer whose slots are not whole pages that follow one another.
    """
    return [_pages(buffer, tokens_per_page) for buffer in buffers]


def page_layout(buffers: Sequence[torch.Tensor], tokens_per_page: int) -> KVLayout:
    """The pages of *buffers*, of which each block has one of each. Raises as ``as_pages``."""
    return KVLayout(as_pages(buffers, tokens_per_page))


def _pages(buffer: torch.Tensor, tokens_per_page: int) -> torch.Tensor:
    slots = buffer.shape[0]
    if slots % tokens_per_page or not buffer.is_contiguous():
        raise ValueError(
            f"a KV buffer of shape {tuple(buffer.shape)} and strides {buffer.stride()} does not consist of whole pages "
            f"of {tokens_per_page} tokens"
        )
    return buffer.view(slots // tokens_per_page, -1)  # (pages, numbers of a page)


def page_numbers(slots: torch.Tensor, tokens_per_page: int) -> list[int]:
    """The pages that the *slots* of consecutive tokens make. Raises ``ValueError`` where they are not whole pages."""
    if slots.numel() % tokens_per_page:
        raise ValueError(f"{slots.numel()} slots are no whole pages of {tokens_per_page} tokens")
    by_page = slots.reshape(-1, tokens_per_page).to(torch.int64)  # (pages, tokens of a page)
    first = by_page[:, :1]
    expected = first + torch.arange(tokens_per_page, device=slots.device)
    if bool((first % tokens_per_page).any()) or not torch.equal(by_page, expected):
        raise ValueError(f"slots that are no aligned pages of {tokens_per_page} tokens")
    numbers: list[int] = (first[:, 0] // tokens_per_page).tolist()
    return numbers
