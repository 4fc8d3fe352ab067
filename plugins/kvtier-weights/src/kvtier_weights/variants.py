"""A model with something changed that its KV depends on, for drivers of ``kvtier certify``.

Decides what is changed. Every change shows in the model's answers.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier_core import UnsupportedModelError

_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its table."""
_MATRIX = 2
"""Dimensions."""
_WORKERS = 2


Start = tuple[Path, dict[str, Any]]
"""A model's directory, and what an engine is started with beside it."""


def other_dtype(model: Path, options: dict[str, Any], workplace: Path) -> Start:  # noqa: ARG001 - as other changes
    """*options* with another ``dtype``."""
    other = "bfloat16" if options.get("dtype") == "float32" else "float32"
    return model, {**options, "dtype": other}


def other_weights(model: Path, options: dict[str, Any], workplace: Path) -> Start:
    """As ``copy_with_other_weights``, in *workplace*."""
    return copy_with_other_weights(model, workplace / "model"), options


def other_rotary_base(config: Any) -> dict[str, Any]:  # noqa: ANN401 - transformers' configuration
    """The ``rope_parameters`` of *config* with twice the base; of several kinds of layers, those of each.

    Raises ``UnsupportedModelError`` for a model that has no such base.
    """
    settings: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    other = _doubled(settings)
    if other == settings:
        raise UnsupportedModelError(
            f"a model of type {config.model_type!r} has no rotary positions with a base"
        )
    return other


def _doubled(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _doubled(value)
        if isinstance(value, Mapping)
        else 2.0 * value
        if name == "rope_theta"
        else value
        for name, value in settings.items()
    }


def check_two_workers(config: Any) -> int:  # noqa: ANN401 - transformers' configuration
    """Two, where that many workers can share the attention heads of *config*, and this machine's cores.

    Raises ``UnsupportedModelError`` where they can't.
    """
    if len(os.sched_getaffinity(0)) < _WORKERS:
        raise UnsupportedModelError("this machine has one core")
    heads = getattr(config.get_text_config(), "num_attention_heads", _WORKERS)
    if heads % _WORKERS:
        raise UnsupportedModelError(f"its {heads} attention heads can't be shared by {_WORKERS} workers")
    return _WORKERS


def copy_with_other_weights(model: Path, copy: Path) -> Path:
    """The directory *copy*, which is made: *model* with the rows of the first matrix of attention in reverse order.

    All files but that one are links. Raises ``UnsupportedModelError`` where no safetensors file has such a matrix.
    """
    for file in sorted(model.glob("*.safetensors")):
        content = bytearray(file.read_bytes())
        if (place := _first_attention_matrix(content)) is not None:
            break
    else:
        raise UnsupportedModelError(f"{model}: no safetensors file has a matrix whose name has 'attn'")
    begin, end, rows = place
    size = (end - begin) // rows
    in_order = [content[start : start + size] for start in range(begin, end, size)]
    content[begin:end] = b"".join(reversed(in_order))
    copy.mkdir()
    for other in model.iterdir():
        if other != file:
            (copy / other.name).symlink_to(other)
    (copy / file.name).write_bytes(content)
    return copy


def _first_attention_matrix(content: bytes | bytearray) -> tuple[int, int, int] | None:
    """Where it begins and ends in a safetensors file, and how many rows it has. The first by name."""
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    table = json.loads(content[_LENGTH_BYTES:start])
    for name in sorted(table):
        if "attn" in name and len(shape := table[name]["shape"]) == _MATRIX:
            begin, end = table[name]["data_offsets"]
            return start + begin, start + end, shape[0]
    return None
