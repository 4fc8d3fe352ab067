"""Changes what SGLang is started with, as its users do: what was computed before must not be reused.

Decides nothing about kvtier. Every change shows in the answers, but for that of the number of ranks.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from kvtier_core import UnsupportedModelError
from kvtier_weights.variants import Start, check_two_workers, other_dtype, other_rotary_base, other_weights


def _rope(model: Path, options: dict[str, Any], workplace: Path) -> Start:  # noqa: ARG001 - as the others
    other = other_rotary_base(AutoConfig.from_pretrained(model, local_files_only=True))
    overrides = {**json.loads(options.get("json_model_override_args", "{}")), "rope_parameters": other}
    return model, {**options, "json_model_override_args": json.dumps(overrides)}


def _ranks(model: Path, options: dict[str, Any], workplace: Path) -> Start:  # noqa: ARG001 - as the others
    if options.get("tp_size", 1) != 1:
        raise UnsupportedModelError("the model as it is has several ranks already")
    ranks = check_two_workers(AutoConfig.from_pretrained(model, local_files_only=True))
    return model, {**options, "tp_size": ranks}


_CHANGES: Mapping[str, Callable[[Path, dict[str, Any], Path], Start]] = {
    "rope": _rope,
    "dtype": other_dtype,
    "weights": other_weights,
    "tp2": _ranks,
}


def change(what: str, model: Path, options: dict[str, Any], workplace: Path) -> Start:
    """The start of SGLang with that changed. *workplace* is a directory that may be written.

    Raises ``UnsupportedModelError`` where the model or the machine can't have it.
    """
    if what not in _CHANGES:
        raise UnsupportedModelError(f"SGLang's driver can't change {what}")
    return _CHANGES[what](model, options, workplace)
