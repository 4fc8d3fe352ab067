"""What the engine says computing costs (C35), watched: nonsense costs hits or time, never a lookup."""

import logging
import math

from kvtier_core.coordinator import RecomputeCost
from kvtier_core.manager.guard import text_of


def watched(cost: RecomputeCost, log: logging.Logger) -> RecomputeCost:
    """An engine's function. What it raises or answers wrongly is logged once, and means that the cost is not known."""
    is_told = False

    def seconds_for(first: int, num_tokens: int) -> float | None:
        nonlocal is_told
        try:
            answer = cost(first, num_tokens)
        except Exception as error:  # noqa: BLE001 - the engine's code, called in each lookup
            problem = f"raised {type(error).__name__}: {text_of(error)}"
        else:
            if _is_time(answer):
                return answer
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


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0
