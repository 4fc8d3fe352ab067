"""The one place where a tier's exceptions are caught (contract C30): named, logged, handed back as a value."""

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from kvtier_core.masking import mask_text

_MAX_KINDS = 1000
"""Kinds of faults told apart; past that counting starts again."""


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
    """What a hook raised, or what was wrong with its answer. ``str`` hides no secrets: the guard's messages do."""

    hook: str
    error: BaseException

    def __str__(self) -> str:
        return f"{self.hook} raised {type(self.error).__name__}: {self.error}"


class Guard:
    """Calls one tier instance's hooks. Used by its hook thread only."""

    def __init__(self, identity: TierIdentity, secrets: Collection[str], log: logging.Logger) -> None:
        self._identity = identity
        self._secrets = secrets
        self._log = log
        self._seen: Counter[tuple[str, str]] = Counter()

    def call(self, hook: str, function: Callable[..., Any], **arguments: object) -> Any:  # noqa: ANN401 - a plugin's answer
        """What *function* returns, or the fault when it raises.

        ``BaseException`` is caught too: a plugin's ``SystemExit`` must not end the hook thread and leave its jobs
        without results.
        """
        try:
            return function(**arguments)
        except BaseException as error:  # noqa: BLE001 - see the docstring
            return self.report(HookFault(hook, error))

    def report(self, fault: HookFault) -> HookFault:
        """Log what a hook did wrong."""
        self._warn(fault.hook, type(fault.error).__name__, str(fault))
        return fault

    def note_failed_job(self, what: str, error: str) -> None:
        """Log why a job failed, in the tier's own words."""
        self._warn(what, error, f"a {what} job failed: {error}")

    def _warn(self, hook: str, kind: str, text: str) -> None:
        """Log the first of its kind and then ever more rarely (at powers of two), with their number."""
        if len(self._seen) >= _MAX_KINDS:
            self._seen.clear()
        self._seen[hook, kind] += 1
        count = self._seen[hook, kind]
        if count & (count - 1) == 0:
            self._log.warning(
                "%s: %s; it costs hits and nothing else. Seen %d times.",
                self._identity,
                mask_text(text, self._secrets),
                count,
            )
