"""How long loads from a tier take (C35): a fixed time and one for each block, judged by the last loads. Pure."""

from collections import deque
from itertools import combinations
from statistics import median

_REMEMBERED = 8
"""Loads that a prediction rests on: few, so that a handful of others brings a new one about."""
_ENOUGH = 3
"""Loads below which there is no prediction."""


class LoadTimes:
    """The last loads of one tier, and what they say about the next."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._model: tuple[float, float] | None = None

    def add(self, blocks: int, seconds: float) -> None:
        """A load of *blocks* took *seconds*."""
        self._samples.append((blocks, seconds))
        self._model = None

    @property
    def model(self) -> tuple[float, float] | None:
        """Fixed seconds and seconds a block; ``None`` while too little is known.

        The median of the slopes between any two loads, and of what is left: no single outlier moves it. Loads of one
        size alone tell no slope, and count as proportional to their size.
        """
        if self._model is None and len(self._samples) >= _ENOUGH:
            slopes = [(t - s) / (m - n) for (n, s), (m, t) in combinations(self._samples, 2) if n != m]
            if slopes:
                per_block = max(0.0, median(slopes))
            else:
                per_block = median(seconds / blocks for blocks, seconds in self._samples)
            fixed = median(seconds - blocks * per_block for blocks, seconds in self._samples)
            self._model = (max(0.0, fixed), per_block)
        return self._model

    def describe(self) -> dict[str, float] | None:
        """The prediction for people: ``fixed`` and ``per_block`` seconds."""
        return None if self.model is None else dict(zip(("fixed", "per_block"), self.model, strict=True))

    def predict(self, blocks: int) -> float | None:
        """Seconds that a load of *blocks* would take; ``None`` while too little is known."""
        if self.model is None:
            return None
        fixed, per_block = self.model
        return fixed + blocks * per_block
