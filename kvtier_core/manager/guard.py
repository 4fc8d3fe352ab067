"""The one place where a tier's exceptions are caught (contract C30): named, logged, handed back as a value."""

import logging
import re
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvtier_core.masking import mask_text

_MAX_KINDS = 1000
"""Kinds of faults told apart; past that each is told once more."""

_MAX_TEXT = 2000
"""Characters of a tier's own words that a message repeats."""
_MAX_DESCRIBED = 500
"""Characters of them that a job's error repeats."""
_MAX_READ = 10 * _MAX_TEXT
"""Characters that are looked through for secrets."""

_MAX_TRACEBACK = 20_000
"""Characters of a traceback that are logged: its end, where it was raised."""

_NUMBERED = re.compile(r"\w*\d\w*")

_CAUSE, _CONTEXT = BaseException.__dict__["__cause__"], BaseException.__dict__["__context__"]
_TRACEBACK = BaseException.__dict__["__traceback__"]
_EXCEPTIONS = BaseExceptionGroup.__dict__["exceptions"]


@dataclass(frozen=True, kw_only=True)
class TierIdentity:
    """Who a tier instance is, for messages: its name in the configuration and the package its type comes from."""

    name: str
    type: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"tier {self.name!r} (type {self.type!r} of {self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class HookFault:
    """What a hook did wrong, without secrets. Not the exception, whose traceback would keep the pool's rows alive."""

    text: str


class Guard:
    """Calls one tier, logs each kind of fault once and counts the others. For any thread."""

    def __init__(self, identity: TierIdentity, secrets: Collection[str], log: logging.Logger) -> None:
        self.identity = identity
        self._secrets = secrets
        self._log = log
        self._lock = threading.Lock()  # guards the two below
        self._told: set[tuple[str, str]] = set()
        self._untold: Counter[str] = Counter()
        """Faults that were not logged, by hook."""

    def call(self, hook: str, function: Callable[..., Any], **arguments: object) -> Any:  # noqa: ANN401 - a plugin's answer
        """What *function* returns, or the fault when it raises, be it ``SystemExit``: the thread and its jobs go on."""
        try:
            return function(**arguments)
        except BaseException as error:  # noqa: BLE001 - see the docstring
            kind = type(error).__name__
            self.debug(hook, error)
            fault = self.report(hook, f"{hook} raised {kind}: {text_of(error)}", kind=kind)
            _forget_frames(error)
            return fault

    def report(self, hook: str, text: str, *, kind: str | None = None, times: int = 1) -> HookFault:
        """A fault happened so many *times*. The first of its *kind* is logged, the others are counted.

        Without a *kind* it is the text: numbers and names of blocks differ each time, what went wrong is the same.
        """
        fault = HookFault(self.mask(text))
        kind = _NUMBERED.sub("#", fault.text) if kind is None else kind
        with self._lock:
            if len(self._told) >= _MAX_KINDS:
                self._told.clear()
            is_told = (hook, kind) in self._told
            self._told.add((hook, kind))
            self._untold[hook] += times if is_told else times - 1
        if not is_told:
            self._log.warning("%s: %s; it costs hits and nothing else.", self.identity, fault.text)
        return fault

    def tell(self, text: str) -> None:
        """Log a sentence whose subject is the tier."""
        self._log.warning("%s %s", self.identity, text)

    def take_untold(self) -> str:
        """The end of a sentence: how many faults were not logged since the last call. Each kind is new again then."""
        with self._lock:
            counts = ", ".join(f"{hook} {count} times" for hook, count in self._untold.items() if count)
            self._told.clear()
            self._untold.clear()
        return f"; what was told of it before happened again: {counts}" if counts else ""

    def debug(self, hook: str, error: BaseException) -> None:
        """Log at debug level where *error* came from."""
        log_traceback(
            self._log, f"{self.identity}: {hook}", error, lambda text: mask_text(text, self._secrets)
        )

    def mask(self, text: str) -> str:
        """*text* without the tier's secrets, and not longer than a message may be."""
        masked = mask_text(text[:_MAX_READ], self._secrets)
        if len(text) > _MAX_READ:
            # A secret that is cut here is not known for one: neither the last word nor the end of several is told.
            masked = masked.rpartition(" ")[0]
            masked = masked[: max(0, len(masked) - max(map(len, self._secrets), default=0))]
        is_whole = len(text) <= _MAX_READ and len(masked) <= _MAX_TEXT
        return masked if is_whole else f"{masked[:_MAX_TEXT]}..."


def _forget_frames(error: BaseException) -> None:
    """Let go of the frames that *error*, and those it came from, passed through.

    They hold views of the pool's rows, and pluggy's hold the error itself, or one that nothing else leads to: a circle
    that keeps the mapping in use until the garbage collector comes by. So the frames are emptied as well. Attributes
    are read past the tier's own class of errors, which may define them.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        frames = _TRACEBACK.__get__(one)
        waiting += _held_by_pluggy(frames)
        traceback.clear_frames(frames)
        BaseException.with_traceback(one, None)
        waiting += (_CAUSE.__get__(one), _CONTEXT.__get__(one))
        if isinstance(one, BaseExceptionGroup):
            waiting += _EXCEPTIONS.__get__(one)


def _held_by_pluggy(frames: TracebackType | None) -> list[BaseException]:
    """Errors in pluggy's own frames: some of its releases look at the tier's error, and fail where that lets nobody."""
    return [
        value
        for frame, _ in traceback.walk_tb(frames)
        if frame.f_globals.get("__name__", "").startswith("pluggy.")
        for value in frame.f_locals.values()
        if issubclass(type(value), BaseException)
    ]


def text_of(value: object) -> str:
    """*value* as text, whatever its ``__str__`` does."""
    try:
        return str(value)
    except BaseException as error:  # noqa: BLE001 - somebody else's code
        return f"<a {type(value).__name__} whose text can't be had: {type(error).__name__}>"


def describe(error: BaseException) -> str:
    """The type and message of *error*, cut to a bearable length, without what looks like a secret in a URL.

    Where the type is kvtier's own, the message alone: it says all.
    """
    text = mask_text(text_of(error))
    text = text if len(text) <= _MAX_DESCRIBED else f"{text[:_MAX_DESCRIBED]}..."
    is_own = type(error).__module__.partition(".")[0].startswith("kvtier_")
    if text and is_own:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def log_traceback(log: logging.Logger, what: str, error: BaseException, mask: Callable[[str], str]) -> None:
    """Log the traceback of *error*, cleaned by *mask*, where debug messages are wanted. Costs nothing elsewhere."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s raised:\n%s", what, mask(_traceback_of(error))[-_MAX_TRACEBACK:])


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error)).rstrip()
    except BaseException as broken:  # noqa: BLE001 - somebody else's class of errors
        return f"<a {type(error).__name__} whose traceback can't be had: {type(broken).__name__}>"


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
