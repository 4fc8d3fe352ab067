"""What the tensors of a model's state hold: digested for a namespace, or watched for changes.

``digest_state`` reads every item, or a few of each tensor. ``StateWatch`` tells cheaply whether a model is as it was.
Which values a state has is read by ``model_state``.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel

from kvtier_core import UnsupportedModelError
from kvtier_transformers.model_state import ModelState, read_state

_WATCHED_ITEMS = 16
_SMALL_BYTES = 4096
"""A tensor up to this size that was written to is compared in whole: it may hold what it held before."""


def digest_state(state: ModelState, *, most: int | None = None) -> str:
    """Digest what is told, and each tensor's dtype, shape and items: all of them, or about *most*, evenly spread.

    Cost: 0.1 s of CPU a GiB; with *most*, some microseconds a tensor. Packed weights are unpacked one at a time. Raises
    ``UnsupportedModelError`` naming a tensor whose items torch can't show as bytes.
    """
    digest = xxhash.xxh3_128(repr(state.told).encode())
    for place, value in state.tensors.items():
        try:
            for tensor in _unpacked(value):
                digest.update(f"{place} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(_bytes(_spread(tensor.reshape(-1), most or tensor.numel())))
        except (RuntimeError, TypeError) as error:
            raise UnsupportedModelError(
                f"{place}: torch can't show what it holds, so it can't be told: {error}"
            ) from error
    return digest.hexdigest()


def _unpacked(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that *value* is, or that torch's packed weights are made of."""
    if not isinstance(value, torch.ScriptObject):
        yield value.detach()
        return
    for part in _flat(value.__getstate__()):
        if isinstance(part, torch.Tensor) and part.is_quantized:
            yield part.int_repr()
            is_by_channel = part.qscheme() in (
                torch.per_channel_affine,
                torch.per_channel_affine_float_qparams,
            )
            yield (
                part.q_per_channel_scales()
                if is_by_channel
                else torch.tensor(part.q_scale(), dtype=torch.float64)
            )
            yield part.q_per_channel_zero_points() if is_by_channel else torch.tensor(part.q_zero_point())
        elif isinstance(part, torch.Tensor):
            yield part
        else:
            yield torch.frombuffer(bytearray(f"{part!r} ".encode()), dtype=torch.uint8)


def _flat(state: Any) -> Iterator[Any]:
    if isinstance(state, list | tuple):
        for part in state:
            yield from _flat(part)
    else:
        yield state


def _spread(items: torch.Tensor, most: int) -> torch.Tensor:
    """About *most* of the items of a tensor of one dimension."""
    return items[:: max(1, len(items) // max(1, most))]


def _bytes(items: torch.Tensor) -> memoryview:
    return items.contiguous().view(torch.uint8).cpu().numpy().data


class StateWatch:
    """Tells whether a model's state is still what it was when this was made.

    It misses a change that torch does not count (through ``.data``) where that is of few items.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ``UnsupportedModelError`` as ``read_state`` does."""
        self._model = model
        self._was = read_state(model)
        self._signs = _signs(self._was.tensors)
        self._small = {
            place: bytes(_bytes(_in_memory(tensor)))
            for place, tensor in self._was.tensors.items()
            if isinstance(tensor, torch.Tensor) and tensor.nbytes <= _SMALL_BYTES
        }
        """Rotary frequencies are among them: some models write them in every forward pass, the same ones again."""
        alike = defaultdict(list)
        for tensor in self._was.tensors.values():
            if isinstance(tensor, torch.Tensor):
                alike[tensor.dtype, tensor.device].append(_spread(_in_memory(tensor), _WATCHED_ITEMS))
        self._samples = list(alike.values())
        """Views of the tensors, in which a change shows: all of a dtype and device are read at once."""
        self._held = self._read()

    def has_changed(self) -> bool:
        """Whether it is not. Cost: 10 us a module, and 2 us a tensor. Raises as the constructor does."""
        now = read_state(self._model)
        is_same = now.told == self._was.told and self._are_signs_as_they_were(now.tensors)
        return not is_same or self._read() != self._held

    def _are_signs_as_they_were(self, tensors: Mapping[str, Any]) -> bool:
        signs = _signs(tensors)
        if signs.keys() != self._signs.keys():
            return False
        for place in [place for place, sign in signs.items() if sign != self._signs[place]]:
            is_in_place = signs[place][0] == self._signs[place][0]
            if not is_in_place or bytes(_bytes(_in_memory(tensors[place]))) != self._small.get(place):
                return False
        self._signs = signs
        return True

    def _read(self) -> list[bytes]:
        return [bytes(_bytes(torch.cat(samples))) for samples in self._samples]


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory from its first item to its last, in one dimension, whatever its strides."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.detach().as_strided((span if tensor.numel() else 0,), (1,))


def _signs(tensors: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Of each where it is, and how often torch saw it written to, if it counts that."""
    return {
        place: (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)  # noqa: SLF001 - there is no other way to ask
        if isinstance(tensor, torch.Tensor)
        else (id(tensor), 0)
        for place, tensor in tensors.items()
    }
