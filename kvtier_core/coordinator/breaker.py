"""The circuit breaker decides whether a tier is asked at all. Pure; time comes in.

Closed: every job goes. After ``failures`` failures in a row it opens: no job goes for a pause. Then one probe job
goes; its success closes the breaker, its failure opens it again with twice the pause, up to a limit.
"""

import enum


class BreakerState(enum.Enum):
    """Whether a tier is in the path."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """One tier's breaker."""

    def __init__(self, failures: int, pause_s: float, max_pause_s: float) -> None:
        self.state = BreakerState.CLOSED
        self._limit = failures
        self._failures = 0
        self._first_pause = pause_s
        self._pause = pause_s
        self._max_pause = max_pause_s
        self._until = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether the tier is in the path: no failures in a row, or fewer than it takes."""
        return self.state is BreakerState.CLOSED

    def allows(self, now: float) -> bool:
        """Whether a job may go now."""
        return self.is_closed or (self.state is BreakerState.OPEN and now >= self._until)

    def submitted(self) -> None:
        """A job went. While the breaker was open, it is the probe."""
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.PROBING

    def withdrawn(self) -> None:
        """A job will say nothing about the tier any more. If it was the probe, the next job takes its place."""
        if self.state is BreakerState.PROBING:
            self.state = BreakerState.OPEN

    def succeeded(self) -> None:
        """A job ended as it should."""
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._pause = self._first_pause

    def failed(self, now: float) -> None:
        """A job failed or passed its deadline, or a hook raised."""
        self._failures += 1
        if self.state is BreakerState.PROBING:
            self._pause = min(self._pause * 2, self._max_pause)
        elif self.state is BreakerState.OPEN or self._failures < self._limit:
            return
        self.state = BreakerState.OPEN
        self._until = now + self._pause
