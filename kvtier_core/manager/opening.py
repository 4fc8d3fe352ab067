"""Opens one tier and takes it to the wanted namespace, once or again and again.

A tier that can't open is tried again where ``limits.open_retry`` is set. One that can't follow a reset is always tried
again: as a rule calls of before still run, and end.

Used by the tier's own thread only. The manager decides whether the engine starts without the tier.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvtier_core.coordinator.presence import ResidentPresence
from kvtier_core.errors import KvtierError, TierOpenError
from kvtier_core.manager.events import OpenFailed, Serving
from kvtier_core.manager.guard import HookFault, text_of
from kvtier_core.manager.port import TierHome

_RESET_RETRY_S = 5.0
"""Pause before a failed reset is tried again, unless ``limits.open_retry`` says another: what hangs takes its time."""


class Opening:
    """How far one tier has come."""

    def __init__(
        self,
        home: TierHome,
        *,
        open_tier: Callable[[], object],
        go_over: Callable[[str, Mapping[str, Any]], object] | None,
        resident: Callable[[], ResidentPresence | None],
    ) -> None:
        """*open_tier* opens the tier, *go_over* takes it to another namespace; ``None`` where it can't do that."""
        self._home = home
        self._guard = home.guard
        self._open_tier = open_tier
        self._go_over = go_over
        self._resident = resident
        self._wanted: Callable[[], object] | None = None
        self.generation = 0
        """The number of the namespace that is wanted."""
        self._is_retry = False
        self._is_explained = False
        self.is_open = False
        """Whether the tier has been opened. Only then may it be called otherwise."""
        self.due: float | None = None
        """When to try again; ``None`` when there is no need, or no use."""

    def want(self, namespace: str, description: Mapping[str, Any], generation: int) -> None:
        """The tier is to serve this namespace (C34). ``attempt`` makes it so."""
        self.generation = generation
        self._wanted = partial(self._reset, namespace, description)

    def attempt(self) -> str | None:
        """Do what is still to be done. Why the tier does not serve yet; ``None`` when it does."""
        self._is_retry, self.due = self.due is not None, None
        self._is_explained = False
        error = None if self.is_open else self._open()
        if error is None and self._wanted is not None:
            answer = self._wanted()
            error = answer.text if isinstance(answer, HookFault) else None
        if error is None:
            self._wanted = None
        else:
            self.due = self._next_try()
        return error

    def _next_try(self) -> float | None:
        pause = self._home.limits.open_retry
        if self.is_open:
            pause = None if self._go_over is None else pause or _RESET_RETRY_S
        return None if pause is None else self._home.clock() + pause

    def report(self, error: str | None) -> None:
        """Report what ``attempt`` returned."""
        name = self._guard.identity.name
        if error is None:
            if self._is_retry:
                self._guard.tell(f"is open now: it serves from here on{self._guard.take_untold()}")
            self._home.emit(Serving(name, self.generation, self._resident()))
        elif not self._is_retry:  # an idle engine takes no events in: later tries tell it nothing new
            self._home.emit(
                OpenFailed(
                    name,
                    error,
                    is_explained=self._is_explained,
                    will_retry=self.due is not None,
                    is_reset=self.is_open,
                )
            )

    def _open(self) -> str | None:
        try:
            self._open_tier()
        except BaseException as error:  # noqa: BLE001 - somebody else's code
            self._guard.debug("open", error)
            self._is_explained = isinstance(error, KvtierError) and error.is_explained
            kind = "" if isinstance(error, TierOpenError) else f"{type(error).__name__}: "
            text = self._guard.mask(kind + text_of(error))
            if self._home.limits.open_retry is not None:
                self._guard.report("open", f"it could not open: {text}", kind=type(error).__name__)
            return text
        self.is_open = True
        return None

    def _reset(self, namespace: str, description: Mapping[str, Any]) -> object:
        if self._go_over is None:
            text = "the tier has no reset hook, so it is left out until the next start"
            return self._guard.report("reset", text)
        return self._guard.call("reset", self._go_over, namespace=namespace, description=description)
