"""What the engine says computing costs (C35), checked: nonsense costs hits or time, never a lookup."""

import logging
import math
from collections.abc import Callable

from kvtier_core.coordinator import RecomputeCost
from kvtier_core.manager.guard import text_of


def check_recompute_cost(cost: object, log: logging.Logger) -> RecomputeCost | None:
    """*cost* as the coordinator may use it. Raises ``ValueError`` when it is no cost at all."""
    if cost is None:
        return None
    if callable(cost):
        return _Checked(cost, log)
    seconds = _as_seconds(cost)
    if seconds is None:
        raise ValueError(
            "a recompute cost must be a number of seconds a token, at least 0, or a function of (first token, number "
            f"of tokens) to seconds, not {text_of(cost)!r}"
        )
    return seconds


def _as_seconds(value: object) -> float | None:
    """*value* where it can be a time; ``None`` where it can't."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    seconds = float(value)
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


class _Checked:
    """An engine's function. What it raises or answers wrongly is logged once, and means that the cost is not known."""

    def __init__(self, cost: Callable[[int, int], object], log: logging.Logger) -> None:
        self._cost = cost
        self._log = log
        self._is_told = False

    def __call__(self, first: int, num_tokens: int) -> float | None:
        try:
            answer = self._cost(first, num_tokens)
        except Exception as error:  # noqa: BLE001 - the engine's code, called in each lookup
            self._tell(f"raised {type(error).__name__}: {text_of(error)}")
            return None
        seconds = _as_seconds(answer)
        if seconds is None:
            self._tell(f"returned {text_of(answer)!r}, which is no number of seconds")
        return seconds

    def _tell(self, what: str) -> None:
        """Say once what was wrong."""
        if not self._is_told:
            self._is_told = True
            self._log.warning(
                "the function given to set_recompute_cost %s: whatever a tier holds is loaded while it does, however "
                "long that takes. Told once; give a function that returns seconds",
                what,
            )
