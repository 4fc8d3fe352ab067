"""Changes a model in memory as its users do: what was computed before must not be reused.

Decides nothing about kvtier. Every change is small, and shows in the answers.
"""

from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedModel

from kvtier_core import UnsupportedModelError

_ROPE_POWER = 1.1
"""The frequencies are powers of the base: this is the base to that power, such as 25,000 instead of 10,000."""
_MATRIX = 2
"""Dimensions."""


def _rope(model: PreTrainedModel) -> None:
    tables = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    if not tables:
        raise UnsupportedModelError(f"{type(model).__name__} has no rotary positions")
    for table in tables:
        table.pow_(_ROPE_POWER)


def _dtype(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16 if model.dtype == torch.float32 else torch.float32)


def _weights(model: PreTrainedModel) -> None:
    """An adapter of rank 1, merged into the first matrix that attention has."""
    matrices = (
        weights for name, weights in model.named_parameters() if "attn" in name and name.endswith("weight")
    )
    matrix = next((weights for weights in matrices if weights.dim() == _MATRIX), None)
    if matrix is None:
        raise UnsupportedModelError(f"no matrix of {type(model).__name__} has a name with 'attn'")
    matrix.add_(matrix[:1].clone())


_CHANGES: Mapping[str, Callable[[PreTrainedModel], None]] = {
    "rope": _rope,
    "dtype": _dtype,
    "weights": _weights,
}


def change(model: PreTrainedModel, what: str) -> None:
    """Change *model* in place. Raises ``UnsupportedModelError`` where it has nothing to change."""
    with torch.no_grad():
        _CHANGES[what](model)
