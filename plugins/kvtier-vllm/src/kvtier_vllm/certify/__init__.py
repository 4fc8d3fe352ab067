"""The driver with which ``kvtier certify`` runs vLLM.

Decides nothing heavy: what can't be certified is refused before vLLM is imported.
"""

import os
from typing import TYPE_CHECKING, Any

from kvtier_core import ConfigError
from kvtier_vllm.compat import check_vllm

if TYPE_CHECKING:
    from kvtier_vllm.certify.engine import CertifiedEngine

_SET_HERE = {
    "disable_log_stats",
    "kv_transfer_config",
    "kvtier",
    "kvtier_config",
    "max_logprobs",
    "max_model_len",
    "model",
    "skip_tokenizer_init",
}
_QUIET = {"VLLM_DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}


def open_engine(opening: Any) -> "CertifiedEngine":
    """An engine as ``kvtier certify`` wants it: *opening* is its ``Opening``.

    The options are arguments of ``LLM``; those that begin with ``kvtier_`` are the connector's.

    Raises ``ConfigError`` for a model that is no directory, and for options that the driver sets itself,
    ``UnsupportedModelError`` for another vLLM and for a variant that this model or machine can't have.
    """
    if not (opening.model / "config.json").is_file():
        raise ConfigError(f"{opening.model}: vLLM is certified with a directory that has a config.json")
    if taken := sorted(_SET_HERE & set(opening.engine_options)):
        raise ConfigError(f"--engine-options: {', '.join(taken)} can't be set: certifying sets it")
    check_vllm()
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    # vLLM: many seconds, and only now needed
    from kvtier_vllm.certify.engine import CertifiedEngine  # noqa: PLC0415
    from kvtier_vllm.certify.variants import change  # noqa: PLC0415

    options = {"enforce_eager": True, **opening.engine_options}
    model = opening.model
    if opening.variant is not None:
        model, options = change(opening.variant, model, options, opening.workplace)
    return CertifiedEngine(model, options, opening)
