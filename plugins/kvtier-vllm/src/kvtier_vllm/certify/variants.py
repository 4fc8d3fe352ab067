"""Changes what vLLM is started with, as its users do: what was computed before must not be reused.

Decides nothing about kvtier. Every change shows in the answers, but for that of the number of workers.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from kvtier_core import UnsupportedModelError
from kvtier_weights.variants import Start, check_two_workers, other_dtype, other_rotary_base, other_weights


def _rope(model: Path, options: dict[str, Any], workplace: Path) -> Start:  # noqa: ARG001 - as the others
    other = other_rotary_base(AutoConfig.from_pretrained(model, local_files_only=True))
    return model, {**options, "hf_overrides": {"rope_parameters": other}}


def _workers(model: Path, options: dict[str, Any], workplace: Path) -> Start:  # noqa: ARG001 - as the others
    if options.get("tensor_parallel_size", 1) != 1:
        raise UnsupportedModelError("the model as it is has several workers already")
    workers = check_two_workers(AutoConfig.from_pretrained(model, local_files_only=True))
    return model, {**options, "tensor_parallel_size": workers}


_CHANGES: Mapping[str, Callable[[Path, dict[str, Any], Path], Start]] = {
    "rope": _rope,
    "dtype": other_dtype,
    "weights": other_weights,
    "tp2": _workers,
}


def change(what: str, model: Path, options: dict[str, Any], workplace: Path) -> Start:
    """The start of vLLM with that changed. *workplace* is a directory that may be written.

    Raises ``UnsupportedModelError`` where the model or the machine can't have it.
    """
    if what not in _CHANGES:
        raise UnsupportedModelError(f"vLLM's driver can't change {what}")
    return _CHANGES[what](model, options, workplace)
