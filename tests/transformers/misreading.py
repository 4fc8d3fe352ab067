"""An adapter that misreads what it has loaded, as after a change of the layout: in the second layer alone."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch

from kvtier_transformers.cache import DeviceKV


def _swap_k_and_v(keys: torch.Tensor, values: torch.Tensor) -> None:
    before = keys.clone()
    keys.copy_(values)
    values.copy_(before)


def _swap_heads(keys: torch.Tensor, _: torch.Tensor) -> None:
    keys.copy_(keys.flip(1))


MISREADINGS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "K and V": _swap_k_and_v,
    "two heads": _swap_heads,
}
"""What changes places."""


def misread(how: str) -> Any:
    """The patch that lets ``DeviceKV`` do so."""
    real = DeviceKV.cache

    def cache(self, length=0, log=None, batch=None):
        keys, values = self.tensors[2:4]  # (tokens, heads, head_dim)
        MISREADINGS[how](keys[:length], values[:length])
        return real(self, length, log, batch)

    return patch.object(DeviceKV, "cache", cache)
