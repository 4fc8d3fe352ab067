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
        return _watched(cost, log)
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


def _watched(cost: Callable[[int, int], object], log: logging.Logger) -> Callable[[int, int], float | None]:
    """An engine's function. What it raises or answers wrongly is logged once, and means that the cost is not known."""
    is_told = False

    def seconds_for(first: int, num_tokens: int) -> float | None:
        nonlocal is_told
        try:
            answer = cost(first, num_tokens)
        except Exception as error:  # noqa: BLE001 - the engine's code, called in each lookup
            problem = f"raised {type(error).__name__}: {text_of(error)}"
        else:
            if (seconds := _as_seconds(answer)) is not None:
                return seconds
            problem = f"returned {text_of(answer)!r}, which is no number of seconds"
        if not is_told:
            is_told = True
            log.warning(
                "the function given to set_recompute_cost %s: whatever a tier holds is loaded while it does, however "
                "long that takes. Told once; give a function that returns seconds",
                problem,
            )
        return None

    return seconds_for
