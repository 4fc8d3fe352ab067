"""What vLLM's prefill steps take, which is what computing costs instead of loading (C35).

vLLM tells its connector neither the size nor the end of a step. So this module stands in the way of the two calls that
begin and end one, in the engine core's process. Decides which steps tell of prefill. Each engine of a process has
times of its own.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from vllm.v1.core.sched.scheduler import Scheduler

from kvtier_core.engine import PrefillCost

_SHARE = 0.5
"""Of a step's tokens, that prefill must have: else the step tells of decoding."""
_MAX_UNDER_WAY = 64
"""Steps: vLLM schedules a few ahead. One that failed has no end."""


@dataclass(eq=False)
class EngineSteps:
    """The steps of one engine that have begun."""

    under_way: deque[tuple[Any, float]] = field(default_factory=lambda: deque(maxlen=_MAX_UNDER_WAY))
    last_end: float = 0.0

    def begin(self, output: Any) -> None:
        """A step was scheduled."""
        self.under_way.append((output, time.monotonic()))

    def end(self, output: Any) -> float | None:
        """The seconds that a step took; ``None`` if its beginning was not seen."""
        now, seconds = time.monotonic(), None
        while self.under_way and seconds is None:
            scheduled, begun = self.under_way.popleft()
            if scheduled is output:
                # Steps that are scheduled ahead begin when those before them end.
                seconds = now - max(begun, self.last_end)
        self.last_end = now
        return seconds


class StepCost:
    """What one engine's steps say of the cost of a token."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._cost = PrefillCost()
        self.engine: EngineSteps | None = None
        """Whose steps count, once one was scheduled."""

    def add(self, tokens: Mapping[str, int], seconds: float) -> None:
        """A step with so many *tokens* by request took *seconds*. Decoding beside prefill makes that look dearer."""
        prefill = sum(count for count in tokens.values() if count > 1)
        if prefill < _SHARE * sum(tokens.values()):
            return
        self._cost.add(prefill, seconds)
        if (cost := self._cost.seconds_per_token()) is not None:
            self._tell(cost)


class Steps:
    """Times every step of this process's schedulers, each of which one thread uses at a time."""

    def __init__(self) -> None:
        self._costs: WeakSet[StepCost] = WeakSet()
        self._is_watching = False
        self._engines: WeakKeyDictionary[Any, EngineSteps] = WeakKeyDictionary()
        self._scheduling = threading.local()

    def watch(self, tell: Callable[[float], None]) -> StepCost:
        """*tell* is called with the cost from now on, as long as what is returned is referenced."""
        cost = StepCost(tell)
        self._costs.add(cost)
        if not self._is_watching:
            self._is_watching = True
            _wrap("schedule", self._around_begin)
            _wrap("update_from_output", self._around_end)
        return cost

    def belongs_here(self, cost: StepCost) -> None:
        """The engine that this thread schedules a step of is the one whose *cost* that is."""
        cost.engine = getattr(self._scheduling, "engine", None)

    def _around_begin(self, call: Callable[..., Any], scheduler: Any, *arguments: Any, **named: Any) -> Any:
        engine = self._scheduling.engine = self._engines.setdefault(scheduler, EngineSteps())
        output = call(scheduler, *arguments, **named)
        engine.begin(output)
        return output

    def _around_end(
        self, call: Callable[..., Any], scheduler: Any, output: Any, *rest: Any, **named: Any
    ) -> Any:
        engine = self._engines.setdefault(scheduler, EngineSteps())
        if (seconds := engine.end(output)) is not None:
            for cost in self._costs:
                if cost.engine is engine:
                    cost.add(output.num_scheduled_tokens, seconds)
        return call(scheduler, output, *rest, **named)


STEPS = Steps()
"""Those of this process."""


def _wrap(name: str, around: Callable[..., Any]) -> None:
    original = getattr(Scheduler, name)

    @wraps(original)
    def method(scheduler: Scheduler, *arguments: Any, **named: Any) -> Any:
        return around(original, scheduler, *arguments, **named)

    setattr(Scheduler, name, method)
