"""Many seeded random runs of a ``World``, and the command line for them.

``python -m kvtier_core.testing.sim --seeds 100 --steps 2000 --json`` runs many; a run that breaks a rule says
how to replay it. What no run has seen is reported too, for it is not proved.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier_core.testing.outcomes import OUTCOMES
from kvtier_core.testing.random_run import Simulation
from kvtier_core.testing.shapes import Shape


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
                f"python -m kvtier_core.testing.sim --first-seed {seed} --seeds 1 --steps {steps})"
            )
        summary.seeds += 1
        summary.steps += simulation.num_steps
        summary.seen.update(simulation.watcher.seen)
    summary.seconds = time.perf_counter() - began
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Exit status 1 when a run broke a rule, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_core.testing.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many runs")
    parser.add_argument("--first-seed", type=int, default=0, help="the first run's seed")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    summary = run_seeds(options.first_seed, options.seeds, options.steps)
    report = {
        "seeds": summary.seeds,
        "steps": summary.steps,
        "steps_per_s": summary.steps_per_s,
        "violations": len(summary.violations),
        "replays": summary.violations,
        "unseen_outcomes": summary.unseen_outcomes,
    }
    lines = [json.dumps(report)] if options.json else [f"{name}: {value}" for name, value in report.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if summary.violations else 0


if __name__ == "__main__":
    sys.exit(main())
