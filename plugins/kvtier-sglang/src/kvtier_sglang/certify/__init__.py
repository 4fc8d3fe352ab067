"""The driver with which ``kvtier certify`` runs SGLang.

Decides nothing heavy: what can't be certified is refused before SGLang's engine is imported.
"""

from typing import TYPE_CHECKING, Any

from kvtier_core import ConfigError
from kvtier_sglang.compat import check_sglang
from kvtier_sglang.plugin import LINKER

if TYPE_CHECKING:
    from kvtier_sglang.certify.engine import CertifiedEngine

_SET_HERE = {"max_total_tokens", "model_path", "skip_tokenizer_init", *LINKER}
_DEFAULTS = {"log_level": "warning", "page_size": 16, "skip_server_warmup": True}


def open_engine(opening: Any) -> "CertifiedEngine":
    """An engine as ``kvtier certify`` wants it: *opening* is its ``Opening``. The options are arguments of ``Engine``.

    Raises ``ConfigError`` for a model that is no directory, and for options that the driver sets itself,
    ``PluginError`` for another SGLang, and ``UnsupportedModelError`` for a variant that this model can't have.
    """
    if not (opening.model / "config.json").is_file():
        raise ConfigError(f"{opening.model}: SGLang is certified with a directory that has a config.json")
    if taken := sorted(_SET_HERE & set(opening.engine_options)):
        raise ConfigError(f"--engine-options: {', '.join(taken)} can't be set: certifying sets it")
    check_sglang()
    # SGLang: many seconds, and only now needed
    from kvtier_sglang.certify.engine import CertifiedEngine  # noqa: PLC0415
    from kvtier_sglang.certify.variants import change  # noqa: PLC0415

    options = {**_DEFAULTS, **opening.engine_options}
    model = opening.model
    if opening.variant is not None:
        model, options = change(opening.variant, model, options, opening.workplace)
    return CertifiedEngine(model, options, opening)
