"""``kvtier config``: every setting's value and where it came from, secrets hidden; or what may be set at all."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from kvtier.schema import make_schema
from kvtier.shown import show_settings
from kvtier.table import format_table
from kvtier_core.settings import Settings, load_settings, read_blocklist

help = "Show every setting, its value and where it came from (secrets hidden)."  # noqa: A001 - the command protocol


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the TOML file (default: the one KVTIER_CONFIG names, if any)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON object")
    how.add_argument("--check", action="store_true", help="only check; print nothing but problems")
    how.add_argument(
        "--schema",
        action="store_true",
        help="print the JSON Schema of the file for the installed tier types, for editors",
    )


def run(args: argparse.Namespace) -> int:
    """Load, check and print. Raises ``ConfigError`` or ``PluginError`` with everything that is wrong."""
    if args.schema:
        return _print_schema(args.config)
    settings = load_settings(file=args.config)
    if args.check:
        return 0
    print(_as_json(settings) if args.json else _as_text(settings))
    return 0


def _print_schema(config: Path | None) -> int:
    schema, problems = make_schema(read_blocklist(config))
    print(json.dumps(schema, indent=2))
    for problem in problems:
        print(f"kvtier: warning: {problem}", file=sys.stderr)
    return 0


def _as_json(settings: Settings) -> str:
    return json.dumps(
        {
            "file": str(settings.file) if settings.file is not None else None,
            "values": [asdict(item) for item in show_settings(settings)],
            "ignored_variables": settings.ignored_variables,
            "unavailable_tiers": dict(settings.unavailable),
        },
        indent=2,
    )


def _as_text(settings: Settings) -> str:
    rows = [
        {"name": item.name, "value": item.text, "source": item.source} for item in show_settings(settings)
    ]
    parts = [format_table(["name", "value", "source"], rows)]
    if settings.ignored_variables:
        parts.append(f"ignored (put there by Kubernetes): {', '.join(settings.ignored_variables)}")
    parts += [
        f"tiers.{name} is disabled and can't be checked: {why}" for name, why in settings.unavailable.items()
    ]
    return "\n".join(parts)
