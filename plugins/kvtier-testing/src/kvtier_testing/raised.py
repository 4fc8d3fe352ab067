"""Where a tier raised: noted when it does, and told when a rule fails for it.

Decides which line of a traceback is the tier's own. One test runs at a time, and a tier raises on threads of its own,
so the notes are the module's.
"""

import linecache
import traceback
from collections import deque
from pathlib import Path

from kvtier_core.manager.guard import describe, text_of

_MAX_TEXT = 300
"""Characters of a tier's own words that a message repeats: an exception may quote a whole block."""
_MAX_NOTES = 100

_notes: deque[tuple[tuple[str, ...], str]] = deque(maxlen=_MAX_NOTES)
"""Of each exception: how messages repeat it, and where it was raised."""


def told(error: BaseException) -> str:
    """An exception in a few words."""
    text = text_of(error)
    return f"{type(error).__name__}: {text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + '...'}"


def forget_raised() -> None:
    """A test begins."""
    _notes.clear()


def note_raised(error: BaseException, tier_class: type[object]) -> None:
    """The tier raised."""
    where = _where(error, tier_class)
    if where is not None:
        _notes.append(((told(error), describe(error)), where))


def where_raised(message: str) -> str | None:
    """The line of the tier's own code where the exception was raised that *message* repeats."""
    places = (where for texts, where in reversed(_notes) if any(text in message for text in texts))
    return next(places, None)


def _where(error: BaseException, tier_class: type[object]) -> str | None:
    """The last frame in a package that *tier_class*, or a base of it that is not the core's, comes from."""
    packages = {base.__module__.partition(".")[0] for base in tier_class.__mro__}
    packages -= {"abc", "builtins", "kvtier_core", "kvtier_testing"}
    own = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] in packages
    ]
    if not own:
        return None
    code, line = own[-1]
    text = linecache.getline(code.co_filename, line).strip()
    return f"{Path(code.co_filename).name}, line {line}, in {code.co_name}: {text}"
