"""The driver with which ``kvtier certify`` runs transformers' engine.

Decides nothing heavy: what can't be certified is refused before torch is imported.
"""

from typing import TYPE_CHECKING, Any

from kvtier_core import ConfigError, UnsupportedModelError
from kvtier_transformers.model_path import check_path

if TYPE_CHECKING:
    from kvtier_transformers.certify.engines import CertifiedEngine, PlainEngine

_VARIANTS = (None, "rope", "dtype", "weights")


def open_engine(opening: Any) -> "CertifiedEngine | PlainEngine":
    """An engine as ``kvtier certify`` wants it: *opening* is its ``Opening``.

    Raises ``ConfigError`` for options, ``UnsupportedModelError`` for a variant that this model can't have, and as
    ``load`` and ``Engine.open`` do.
    """
    if opening.engine_options:
        raise ConfigError(
            f"--engine-options: transformers takes none, not {', '.join(opening.engine_options)}"
        )
    if opening.variant not in _VARIANTS:
        raise UnsupportedModelError("transformers' engine runs in one process")
    check_path(opening.model)
    # torch and transformers: seconds, and only now needed
    from kvtier_transformers.certify import engines  # noqa: PLC0415
    from kvtier_transformers.certify.variants import change  # noqa: PLC0415
    from kvtier_transformers.models import load  # noqa: PLC0415

    loaded = load(opening.model)
    if opening.variant is not None:
        change(loaded.model, opening.variant)
    kind = engines.CertifiedEngine if opening.has_kvtier else engines.PlainEngine
    return kind(loaded, opening)
