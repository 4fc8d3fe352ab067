"""Changes what vLLM is started with, as its users do: what was computed before must not be reused.

Decides nothing about kvtier. Every change shows in the answers, but for that of the number of workers.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from kvtier_core import UnsupportedModelError

_Start = tuple[Path, dict[str, Any]]
"""A model's directory, and the arguments of ``LLM``."""
_MATRIX = 2
"""Dimensions."""
_WORKERS = 2


def _rope(model: Path, options: dict[str, Any], workplace: Path) -> _Start:  # noqa: ARG001 - as the others
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    settings = getattr(config, "rope_parameters", None)
    other = {} if settings is None else _with_other_base(settings)
    if other == (settings or {}):
        raise UnsupportedModelError(
            f"a model of type {config.model_type!r} has no rotary positions with a base"
        )
    return model, {**options, "hf_overrides": {"rope_parameters": other}}


def _with_other_base(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same rotary positions with twice the base; of several kinds of layers, those of each."""
    return {
        name: _with_other_base(value)
        if isinstance(value, Mapping)
        else 2.0 * value
        if name == "rope_theta"
        else value
        for name, value in settings.items()
    }


def _dtype(model: Path, options: dict[str, Any], workplace: Path) -> _Start:  # noqa: ARG001 - as the others
    other = "bfloat16" if options.get("dtype") == "float32" else "float32"
    return model, {**options, "dtype": other}


def _weights(model: Path, options: dict[str, Any], workplace: Path) -> _Start:
    """A copy of the directory, with an adapter of rank 1 merged into the first matrix that attention has."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            weights = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - it is no mapping
            metadata = tensors.metadata()
        names = sorted(name for name, weight in weights.items() if "attn" in name and weight.dim() == _MATRIX)
        if names:
            break
    else:
        raise UnsupportedModelError(f"{model}: no safetensors file has a matrix whose name has 'attn'")
    matrix = weights[names[0]]
    matrix += matrix[:1].clone()
    copy = workplace / "model"
    copy.mkdir()
    for other in model.iterdir():
        if other != file:
            (copy / other.name).symlink_to(other)
    save_file(weights, copy / file.name, metadata=metadata)
    return copy, options


def _workers(model: Path, options: dict[str, Any], workplace: Path) -> _Start:  # noqa: ARG001 - as the others
    if options.get("tensor_parallel_size", 1) != 1:
        raise UnsupportedModelError("the model as it is has several workers already")
    if len(os.sched_getaffinity(0)) < _WORKERS:
        raise UnsupportedModelError("this machine has one core")
    config = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config()
    heads = getattr(config, "num_attention_heads", _WORKERS)
    if heads % _WORKERS:
        raise UnsupportedModelError(f"its {heads} attention heads can't be shared by {_WORKERS} workers")
    return model, {**options, "tensor_parallel_size": _WORKERS}


_CHANGES: Mapping[str, Callable[[Path, dict[str, Any], Path], _Start]] = {
    "rope": _rope,
    "dtype": _dtype,
    "weights": _weights,
    "tp2": _workers,
}


def change(what: str, model: Path, options: dict[str, Any], workplace: Path) -> _Start:
    """The start of vLLM with that changed. *workplace* is a directory that may be written.

    Raises ``UnsupportedModelError`` where the model or the machine can't have it.
    """
    if what not in _CHANGES:
        raise UnsupportedModelError(f"vLLM's driver can't change {what}")
    return _CHANGES[what](model, options, workplace)
