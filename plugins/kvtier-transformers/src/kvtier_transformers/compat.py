"""What differs between the transformers releases supported, and what they do unasked, in one place."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, cache_utils
from transformers.utils import logging

from kvtier_core import UnsupportedModelError

_CACHE_NAMES = ("cache", "past_key_values")


def cache_keyword(model: PreTrainedModel) -> str:
    """The keyword that takes the KV cache in ``model.forward``: renamed to ``cache`` in transformers 5.24.

    Raises ``UnsupportedModelError`` when it names none.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in _CACHE_NAMES:
        if name in parameters:
            return name
    raise UnsupportedModelError(
        f"{type(model).__name__}.forward({', '.join(parameters)}) has no argument 'cache' or 'past_key_values' by "
        "name, so it can't be given kvtier's cache: name it there"
    )


def last_logits_only(model: PreTrainedModel) -> dict[str, int]:
    """The argument that lets ``model.forward`` compute the logits of the last token alone, where it has one."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def rope_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Rotary positions as one dictionary, as from release 5 on; before, base and scaling were two settings."""
    together = getattr(config, "rope_parameters", None)
    if together is not None:
        return dict(together)
    scaling = getattr(config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {"rope_theta": getattr(config, "rope_theta", None)} | scaling | {"rope_type": kind}


LAYER_WITHOUT_KV: Any = getattr(cache_utils, "DummyLayer", None)
"""Transformers' layer for what keeps no KV of its own. Older releases have none, and leave such layers out."""


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Load weights without transformers' progress bar, which writes to stderr and would garble a program's own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
