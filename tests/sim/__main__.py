"""The command line of the simulator.

``python -m tests.sim --seeds 100 --steps 2000 --json`` runs many seeds; a run that breaks a rule says how to replay it.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from tests.sim.runs import run_seeds


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Exit status 1 when a run broke a rule, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
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
