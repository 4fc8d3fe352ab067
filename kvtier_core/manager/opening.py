"""Opens one tier and takes it to the namespace that is wanted, at once or later, again and again.

A tier that can't open is tried again where that is set. One that was open and can't follow a reset is tried again
always: as a rule calls of before still run, and end.

Used by the tier's hook thread only. Decides when to try next; whether the engine starts without the tier is decided by
the manager.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvtier_core.errors import KvtierError, TierOpenError
from kvtier_core.manager.guard import Guard, HookFault, text_of
from kvtier_core.values import PoolView

_RESET_RETRY_S = 5.0
"""When a reset is tried again that failed, where ``limits.open_retry`` does not say: what hung may take its time."""


class Opening:
    """How far one tier has come. *hooks* are pluggy's callers of its hook implementations."""

    def __init__(
        self,
        hooks: Any,  # noqa: ANN401 - pluggy makes the callers' names at run time
        pool: PoolView | None,
        guard: Guard,
        *,
        retry_s: float | None,
        clock: Callable[[], float],
    ) -> None:
        self._hooks = hooks
        self._pool = pool
        self._guard = guard
        self._retry_s = retry_s
        self._clock = clock
        self._go_over: Callable[[], object] | None = None
        self.generation = 0
        """The number of the namespace that is wanted."""
        self.is_open = False
        """Whether the tier has been opened; only then other hooks may be called."""
        self.due: float | None = None
        """When to try again; ``None`` when there is no need, or no use."""
        self.is_explained = False
        """Whether what the last ``attempt`` returned says what to do."""

    def want(self, namespace: str, description: Mapping[str, Any], generation: int) -> None:
        """The tier is to serve this namespace (C34). ``attempt`` makes it so."""
        self.generation = generation
        self._go_over = partial(self._hooks.reset, namespace=namespace, description=description)

    def attempt(self) -> str | None:
        """Do what is still to be done. Why the tier does not serve yet, or ``None``: it does."""
        self.due = None
        self.is_explained = False
        error = None if self.is_open else self._open()
        if error is None and self._go_over is not None:
            if not self._hooks.reset.get_hookimpls():
                text = "the tier has no reset hook, so it is left out until the next start"
                return self._guard.report("reset", "none", text).text
            answer = self._guard.call("reset", self._go_over)
            error = answer.text if isinstance(answer, HookFault) else None
        if error is None:
            self._go_over = None
        elif (pause := self._retry_s or (_RESET_RETRY_S if self.is_open else None)) is not None:
            self.due = self._clock() + pause
        return error

    def _open(self) -> str | None:
        try:
            self._hooks.on_open(pool=self._pool)
        except BaseException as error:  # noqa: BLE001 - somebody else's code
            self._guard.debug("on_open", error)
            self.is_explained = isinstance(error, KvtierError) and error.is_explained
            kind = "" if isinstance(error, TierOpenError) else f"{type(error).__name__}: "
            text = self._guard.mask(kind + text_of(error))
            if self._retry_s is not None:
                self._guard.report("on_open", type(error).__name__, f"it could not open: {text}")
            return text
        self.is_open = True
        return None
