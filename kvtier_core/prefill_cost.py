"""What computing a prompt costs, learned from the prompts that were computed (C35). Pure."""

from collections import deque
from statistics import median

_REMEMBERED = 8
"""Prompts that the cost rests on."""
_ENOUGH = 3
"""Prompts below which nothing is said: the first is slow, since a model warms up."""
_MIN_TOKENS = 128
"""A shorter computation is mostly what every forward pass costs, and tells little of a token's cost."""


class PrefillCost:
    """Seconds a token, the median of the last prompts: no single one moves it."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Computing so many tokens of a prompt took so long."""
        if num_tokens >= _MIN_TOKENS and seconds > 0:
            self._samples.append(seconds / num_tokens)

    def seconds_per_token(self) -> float | None:
        """``None`` while too little is known."""
        return median(self._samples) if len(self._samples) >= _ENOUGH else None
