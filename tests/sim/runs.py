"""Many seeded random runs of a ``World``, and what they came to. What no run has seen is reported: it is not proved."""

import time
from collections import Counter
from dataclasses import dataclass, field

from tests.sim.outcomes import OUTCOMES
from tests.sim.random_run import Simulation
from tests.sim.shapes import Shape


@dataclass(slots=True)
class Summary:
    """What a set of runs came to. ``violations`` say each how to replay it."""

    seeds: int = 0
    steps: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def unseen_outcomes(self) -> list[str]:
        """Outcomes that no run saw."""
        return sorted(OUTCOMES - {name for name, count in self.seen.items() if count})

    @property
    def steps_per_s(self) -> int:
        """Steps of the simulation in one second of real time."""
        return round(self.steps / self.seconds) if self.seconds else 0


def run_seeds(first_seed: int, seeds: int, steps: int, shape: Shape | None = None) -> Summary:
    """Run *seeds* runs of *steps* steps each. A run that breaks a rule is written down and the next one goes on."""
    summary = Summary()
    began = time.perf_counter()
    for seed in range(first_seed, first_seed + seeds):
        simulation = Simulation(seed, shape)
        try:
            simulation.run(steps)
        except Exception as error:  # noqa: BLE001 - a KeyError in the coordinator is as much of a violation
            summary.violations.append(
                f"{type(error).__name__}: {error} (seed {seed}, step {simulation.num_steps}; replay: "
                f"python -m tests.sim --first-seed {seed} --seeds 1 --steps {steps})"
            )
        summary.seeds += 1
        summary.steps += simulation.num_steps
        summary.seen.update(simulation.watcher.seen)
    summary.seconds = time.perf_counter() - began
    return summary
