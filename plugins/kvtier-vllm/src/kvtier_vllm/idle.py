"""How long the end of a scheduler's step waits for the tiers, so that their threads get to run.

vLLM asks again and again for what is being loaded, and a loop in Python keeps the interpreter for itself, 5 ms at a
time. Pure.
"""

from collections.abc import Collection

YIELD_S = 1e-4
"""Where some request waits for a tier while others may run."""
IDLE_WAIT_S = 5e-3
"""At most, where no request can run before a tier or a device copy is done. A request that comes meanwhile waits as
long; steps that only ask take processor time from the copies."""


class Waiters:
    """Which requests there are, and which of them were told in this step to ask again."""

    def __init__(self) -> None:
        self._live: set[object] = set()
        self._waiting: set[object] = set()

    def begin(self, request: object) -> None:
        """There is one more."""
        self._live.add(request)

    def end(self, request: object) -> None:
        """It is over. One that never began is fine."""
        self._live.discard(request)
        self._waiting.discard(request)

    def wait(self, request: object) -> None:
        """It was told to ask again."""
        self._waiting.add(request)

    def end_step(self, loading: Collection[object]) -> float:
        """Seconds to wait now, for at most; *loading* are the requests whose blocks are on their way to the device."""
        if not self._waiting:
            return 0.0
        is_idle = self._live <= self._waiting.union(loading)
        self._waiting.clear()
        return IDLE_WAIT_S if is_idle else YIELD_S
