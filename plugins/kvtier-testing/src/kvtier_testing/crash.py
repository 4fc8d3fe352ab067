"""Kills processes that write to a persistent tier, and looks at what they leave (contract C32).

``python -m kvtier_testing.crash --tier disk --kills 300 --json``. For every kill a process opens the tier and
stores, loads and deletes blocks with several threads until it is ended by SIGKILL: at a random moment, or between two
lines of the plugin's own code, which no choice of fault points could cover as well. Then a new process must be able to
open the tier, get complete blocks or none, find what the dead process had been told is stored, and store every key.

With ``--power-cuts`` what a process wrote is recorded, and the disk is made as a power failure would leave it: what no
sync covered is dropped or reordered, sector by sector, the tier's own index among it. Needs a C compiler, and a tier
with a directory. What such a disk gives may be less, and may be torn as long as no proof holds for it.

Decides nothing about a tier but how often it is killed. The status is 0 when nothing went wrong.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvtier_core.errors import KvtierError
from kvtier_testing.crash_processes import count_lines, kill_writer, look
from kvtier_testing.power_loss import cut_power
from kvtier_testing.subjects import Subject, make_subject

_LONGEST_LIFE_S = 0.25
_FAILURES = ("wrong_bytes", "failed_restarts", "unstorable_keys", "acknowledged_missing")


def run(subject: Subject, directory: Path, *, kills: int, power_cuts: int, seed: int) -> dict[str, object]:
    """Kill as often as asked; what was found, counted."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    seen: Counter[str] = Counter(dict.fromkeys(_FAILURES, 0))
    lines = count_lines(subject)
    for number in range(kills):
        at_line = rng.randrange(1, lines) if number % 2 else None
        told = kill_writer(subject, number, at_line, rng.uniform(0.0, _LONGEST_LIFE_S))
        seen["killed_between_lines" if at_line else "killed_at_a_moment"] += 1
        seen += look(subject, number, told, torn_is_wrong=True)
    if power_cuts:
        seen += cut_power(subject, directory, power_cuts, rng)
    counted = {name: seen[name] for name in (*_FAILURES, *sorted(set(seen) - set(_FAILURES)))}
    return {"tier": subject.settings.type, "seed": seed, "kills": kills, "power_cuts": power_cuts, **counted}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, report; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_testing.crash", description=__doc__)
    parser.add_argument("--tier", required=True, metavar="TYPE", help="the tier type, as in a configuration")
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="writers to kill (default 100)")
    parser.add_argument("--power-cuts", type=int, default=0, metavar="N", help="power failures to simulate")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the tier"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is random here (default 0)")
    parser.add_argument("--directory", type=Path, help="where the tier may write (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(dir=given.directory, prefix="kvtier-crash-") as name:
            directory = Path(name).resolve()
            subject = make_subject(given.tier, directory / "root", given.set)
            report = run(subject, directory, kills=given.kills, power_cuts=given.power_cuts, seed=given.seed)
    except KvtierError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    text = json.dumps(report) if given.json else os.linesep.join(f"{k:>24}  {v}" for k, v in report.items())
    sys.stdout.write(f"{text}\n")
    return 1 if any(report[name] for name in _FAILURES) else 0


if __name__ == "__main__":
    sys.exit(main())
