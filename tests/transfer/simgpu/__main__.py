"""The command line of the simulated GPU.

``python -m tests.transfer.simgpu --jobs 5000 --json`` runs stores and loads, makes every deliberate mistake, and lets
the self-test find every device that lies. A run of seed N that found wrong bytes is repeated with
``--first-seed N --jobs 20``, but for the moments of its threads.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from tests.transfer.simgpu.liars import LIARS, TRUTHFUL, find_out
from tests.transfer.simgpu.mutants import MUTANTS, kill
from tests.transfer.simgpu.run import JOBS, run_jobs


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Exit status 1 when something was wrong, missed, or never seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.transfer.simgpu", description=__doc__)
    parser.add_argument(
        "--jobs", type=int, default=5000, help=f"how many stores and loads, {JOBS} for each seed"
    )
    parser.add_argument("--first-seed", type=int, default=0, help="the first run's seed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    found = run_jobs(options.first_seed, options.jobs)
    survivors = [mutant.name for mutant in MUTANTS if kill(mutant) is None]
    uncaught = [liar.__name__ for liar in LIARS if find_out(liar) is None]
    report = {
        "jobs": found.jobs,
        "wrong": len(found.wrong),
        "first_wrong": found.wrong[:10],
        "unseen_outcomes": found.unseen_outcomes,
        "mutants": len(MUTANTS),
        "mutants_killed": len(MUTANTS) - len(survivors),
        "survivors": survivors,
        "liars": len(LIARS),
        "liars_caught": len(LIARS) - len(uncaught),
        "uncaught": uncaught,
        "wrongly_refused": {kind.__name__: why for kind in TRUTHFUL if (why := find_out(kind)) is not None},
    }
    lines = [json.dumps(report)] if options.json else [f"{name}: {value}" for name, value in report.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    bad = ("wrong", "unseen_outcomes", "survivors", "uncaught", "wrongly_refused")
    return 1 if any(report[name] for name in bad) else 0


if __name__ == "__main__":
    sys.exit(main())
