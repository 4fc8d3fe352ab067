"""Where a tier's error came from, as text for the log at debug level.

Keeps no frame: those hold the pool's rows. Never raises, whatever the error's class makes of being looked at.
"""

import logging
import traceback
from collections.abc import Callable

_MAX_TEXT = 20_000
"""Characters of a traceback that are logged: its end, where it was raised."""


def log_traceback(log: logging.Logger, what: str, error: BaseException, mask: Callable[[str], str]) -> None:
    """Log the traceback of *error*, cleaned by *mask*, where debug messages are wanted. Costs nothing elsewhere."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s raised:\n%s", what, mask(_text_of(error))[-_MAX_TEXT:])


def _text_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error)).rstrip()
    except BaseException as broken:  # noqa: BLE001 - somebody else's class of errors
        return f"<a {type(error).__name__} whose traceback can't be had: {type(broken).__name__}>"
