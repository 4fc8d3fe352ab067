"""``kvtier list``: the tier types that installed distributions offer. Imports none of them."""

import argparse
import json
from dataclasses import asdict

from kvtier_core.cli.table import format_table
from kvtier_core.plugins import list_tier_types

help = "List the installed tier types, their plugins and API, without importing any."  # noqa: A001 - the command protocol


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> int:
    """Print the list; always 0, since a plugin that can't be used harms nobody who doesn't use it."""
    entries = [asdict(entry) for entry in list_tier_types()]
    if args.json:
        print(json.dumps(entries, indent=2))
    elif entries:
        print(format_table(["name", "distribution", "version", "group", "status"], entries))
    else:
        print("no tier types are installed; try: pip install kvtier-disk")
    return 0
