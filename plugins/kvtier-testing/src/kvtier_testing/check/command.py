"""``kvtier check TIER``: tries the rules that every tier must keep on a configured tier and its storage."""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from functools import partial
from typing import TextIO

from kvtier_core.settings import load_settings
from kvtier_testing.arguments import add_tier, duration
from kvtier_testing.check.running import PATIENCE_S, RuleReport, Run
from kvtier_testing.configured import ConfiguredTier, describe_left

help = (  # noqa: A001 - the command protocol
    "Try the rules that every tier must keep on a configured tier and its storage, in namespaces of its own that are "
    "removed afterwards. It holds up to 2 MiB of blocks at a time (a disk tier takes up to 10 MiB for them) and reads "
    "no other; a full tier makes room for them as it does for an engine."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_tier(parser)
    parser.add_argument(
        "--timeout",
        type=duration,
        default=600.0,
        metavar="TIME",
        help=f"after which no other rule is begun; any call may take {PATIENCE_S:g} s (default 10m)",
    )


def run(args: argparse.Namespace) -> int:
    """Try every rule; 1 when one failed or was not tried for lack of time.

    Raises ``ConfigError``, ``PluginError`` or ``TierOpenError``.
    """
    started = time.monotonic()
    tier = ConfiguredTier(load_settings(file=args.config), args.tier, PATIENCE_S)
    check = Run(tier, args.timeout, None if args.json else partial(_tell, sys.stdout))
    check.work()
    if args.json:
        found = {
            "ok": check.is_well,
            "tier": args.tier,
            "rules": [asdict(report) for report in check.reports],
            "left_behind": check.left_behind,
        }
        print(json.dumps(found, indent=2))
    else:
        _sum_up(check, time.monotonic() - started)
    return 0 if check.is_well else 1


def _tell(out: TextIO, report: RuleReport) -> None:
    why = f": {report.message}" if report.status == "skipped" else ""
    print(f"{report.status:<7}  {report.number:<4}  {report.name}{why}", file=out)
    if report.status == "failed":
        print(f"  {report.message}", file=out)
    out.flush()


def _sum_up(check: Run, seconds: float) -> None:
    counts = Counter(report.status for report in check.reports)
    told = ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "skipped"))
    print(f"tier {check.tier.name!r}: {told}, in {seconds:.0f} s")
    for line in describe_left(check.left_behind, check.prefix):
        print(line)
