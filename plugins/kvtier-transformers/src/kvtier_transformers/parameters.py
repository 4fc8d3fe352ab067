"""What a model's parameters hold in memory: its files may have been others when it was loaded, or it was changed since.

Decides how much of a parameter is looked at. Knows neither files nor namespaces.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import xxhash
from transformers import PreTrainedModel

_WATCHED_ITEMS = 16


def digest_parameters(model: PreTrainedModel, *, most: int | None = None) -> str | None:
    """Digest each parameter's name, dtype, shape and items: all of them, or about *most*, evenly spread.

    ``None`` when the items of one can't be read (it is sparse, or quantized in a way of its own). Cost: 0.1 s of CPU a
    GiB; with *most*, some microseconds a parameter.
    """
    digest = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        try:
            digest.update(_bytes(_spread(parameter, most or parameter.numel())))
        except (RuntimeError, TypeError):  # what torch says of a tensor whose layout has no such view
            return None
    return digest.hexdigest()


def _spread(parameter: torch.Tensor, most: int) -> torch.Tensor:
    """About *most* of the parameter's items."""
    items = parameter.detach().reshape(-1)
    return items[:: max(1, len(items) // max(1, most))]


def _bytes(items: torch.Tensor) -> memoryview:
    return items.contiguous().view(torch.uint8).numpy().data


class ParameterWatch:
    """Tells whether a model's parameters are still those they were when it was made.

    It misses a change that torch does not count (through ``.data``) where that is of few items.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        parameters = list(model.parameters())
        self._were = _signs(parameters)
        by_dtype = defaultdict(list)
        for parameter in parameters:
            if parameter.layout is torch.strided:
                by_dtype[parameter.dtype].append(_spread(parameter, _WATCHED_ITEMS))
        self._samples = list(by_dtype.values())
        """Views of the parameters: all of a dtype are read at once."""
        self._held = self._read()

    def has_changed(self) -> bool:
        """Whether they are not. Cost: 5 us a parameter."""
        return _signs(list(self._model.parameters())) != self._were or self._read() != self._held

    def _read(self) -> list[bytes]:
        return [bytes(_bytes(torch.cat(samples))) for samples in self._samples]


def _signs(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Of each where it is, if that can be said, and how often torch saw it written to, if it counts that."""
    return [
        (
            parameter.data_ptr() if parameter.layout is torch.strided else id(parameter),
            0 if parameter.is_inference() else parameter._version,  # noqa: SLF001 - there is no other way to ask
        )
        for parameter in parameters
    ]
