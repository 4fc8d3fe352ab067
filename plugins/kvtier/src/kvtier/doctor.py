"""``kvtier doctor``: whether every configured tier opens, stores, loads and deletes, and what to do if not.

And whether kvtier copies right from every accelerator that torch sees.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvtier.accelerators import AcceleratorReport, examine_accelerators
from kvtier.examination import TierReport, examine_tier
from kvtier_core.errors import ConfigError
from kvtier_core.settings import load_settings
from kvtier_core.units import parse_duration

help = "Try every accelerator, and every configured tier with one block of its own; say what to do where one fails."  # noqa: A001 - the command protocol


def _duration(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not seconds:
        raise argparse.ArgumentTypeError('must be more than 0, such as "30s"')
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the TOML file (default: the one KVTIER_CONFIG names, if any)",
    )
    parser.add_argument(
        "--timeout",
        type=_duration,
        default=30.0,
        metavar="TIME",
        help="how long one tier may take (default 30s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Examine the accelerators, then the tiers, one after another; 1 when one failed.

    Raises ``ConfigError``, also when there is nothing to examine, or ``PluginError``.
    """
    settings = load_settings(file=args.config)
    accelerators = []
    for accelerator in examine_accelerators():
        accelerators.append(accelerator)
        if not args.json:
            print(_accelerator_as_text(accelerator), flush=True)
    without = settings.why_without_tiers()
    if without is not None and not accelerators:
        raise ConfigError(f"there is nothing to examine: {without}")
    reports = []
    for name in settings.enabled_tiers:
        reports.append(examine_tier(settings, name, args.timeout))
        if not args.json:
            print(_as_text(reports[-1]), flush=True)
    disabled = [name for name in settings.tiers if name not in settings.enabled_tiers]
    disabled += settings.unavailable
    ok = all(report.ok for report in reports) and all(item.passed is not None for item in accelerators)
    if args.json:
        found = {
            "ok": ok,
            "accelerators": [{"ok": item.passed is not None, **asdict(item)} for item in accelerators],
            "tiers": [asdict(item) for item in reports],
            "disabled": disabled,
        }
        print(json.dumps(found, indent=2))
    else:
        print(_summary(reports, disabled) if without is None else f"no tier was tried: {without}")
    return 0 if ok else 1


def _accelerator_as_text(report: AcceleratorReport) -> str:
    who = f"accelerator {report.device} ({report.name})"
    if report.passed is not None:
        return f"{who}: ok ({report.passed.describe()})"
    return f"{who}: FAILED\n  why: {report.problem}"


def _as_text(report: TierReport) -> str:
    times = ", ".join(f"{step} {seconds * 1000:.1f} ms" for step, seconds in report.seconds.items())
    who = f"tier {report.name!r} (type {report.type!r} of {report.distribution} {report.version})"
    lines = [
        f"{who}: {'ok' if report.ok else f'FAILED to {report.failed_step}'}{f' ({times})' if times else ''}"
    ]
    if report.problem is not None:
        lines.append(f"  why: {report.problem}")
    if report.advice is not None:
        lines.append(f"  what to do: {report.advice}")
    if report.left_behind is not None:
        lines.append(f"  left behind: {report.left_behind}")
    return "\n".join(lines)


def _summary(reports: Sequence[TierReport], disabled: Sequence[str]) -> str:
    failed = sum(not report.ok for report in reports)
    tiers = f"{len(reports)} tier{'s' if len(reports) != 1 else ''}"
    text = f"{failed} of {tiers} failed" if failed else f"all is well ({tiers})"
    return text + (f"; not tried, because disabled: {', '.join(disabled)}" if disabled else "")
