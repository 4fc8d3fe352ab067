"""The one place where a tier's exceptions are caught (contract C30): named, logged, handed back as a value."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtier_core.masking import mask_text


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
    """What a hook raised."""

    hook: str
    error: BaseException

    def __str__(self) -> str:
        return f"{self.hook} raised {type(self.error).__name__}: {mask_text(str(self.error))}"


class Guard:
    """Calls one tier instance's hooks. Used by its hook thread only."""

    def __init__(self, identity: TierIdentity, log: logging.Logger) -> None:
        self._identity = identity
        self._log = log
        self._seen: Counter[tuple[str, type[BaseException]]] = Counter()

    def call(self, hook: str, function: Callable[..., Any], **arguments: Any) -> Any | HookFault:
        """What *function* returns, or the fault when it raises.

        ``BaseException`` is caught too: a plugin's ``SystemExit`` must not end the hook thread and leave its jobs
        without results.
        """
        try:
            return function(**arguments)
        except BaseException as error:  # noqa: BLE001 - see the docstring
            return self.report(HookFault(hook, error))

    def report(self, fault: HookFault) -> HookFault:
        """Log *fault*, the first of its kind and then ever more rarely (at powers of two), with their number."""
        kind = (fault.hook, type(fault.error))
        self._seen[kind] += 1
        count = self._seen[kind]
        if count & (count - 1) == 0:
            self._log.warning(
                "%s: %s; it costs hits and nothing else. Seen %d times.", self._identity, fault, count
            )
        return fault
