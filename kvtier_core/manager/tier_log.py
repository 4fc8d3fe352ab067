"""The logger a tier is given: like any other below ``kvtier``, but the tier's secrets never get through it."""

import logging
from collections.abc import Collection

from kvtier_core.masking import mask_text


class _Mask(logging.Filter):
    """Renders each record at once, so that no later formatter sees what is hidden."""

    def __init__(self, secrets: Collection[str]) -> None:
        super().__init__()
        self._secrets = secrets

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = mask_text(record.getMessage(), self._secrets)
        record.args = ()
        if record.exc_info:
            text = logging.Formatter().formatException(record.exc_info)
            record.exc_text = mask_text(text, self._secrets)
            record.exc_info = None
        return True


def make_tier_log(parent: logging.Logger, name: str, secrets: Collection[str]) -> logging.Logger:
    """A logger below *parent* that belongs to one tier instance, and goes with it: logging keeps no reference."""
    log = logging.Logger(f"{parent.name}.{name}")  # noqa: LOG001 - not one that logging keeps for ever
    log.parent = parent
    log.addFilter(_Mask(secrets))
    return log
