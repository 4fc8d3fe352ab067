"""``kvtier list``: the tier types, eviction policies and commands that installed distributions offer.

Imports none, unless it is asked to try each (``--load``).
"""

import argparse
import json
from pathlib import Path

from kvtier.listing import AVAILABLE, BROKEN, list_plugins, load_offer
from kvtier.table import format_table
from kvtier_core.settings import read_blocklist

_OF_OFFER = ("name", "distribution", "version", "group")

help = "List the installed plugins and what they offer, without importing any."  # noqa: A001 - the command protocol


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the TOML file whose blocked_plugins count (default: the one KVTIER_CONFIG names, if any)",
    )
    parser.add_argument("--load", action="store_true", help="import each, and say why one can't be used")
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> int:
    """Print the list; 0, since a plugin that can't be used harms nobody who doesn't use it. With ``--load``, 1 for one.

    Raises ``ConfigError`` when the list of blocked plugins can't be read.
    """
    blocked = read_blocklist(args.config)
    offers = list_plugins(blocked)
    if args.load:
        offers = [
            (offer, load_offer(offer, blocked) if said == AVAILABLE else said) for offer, said in offers
        ]
    entries = [
        {**{name: getattr(offer, name) for name in _OF_OFFER}, "status": status} for offer, status in offers
    ]
    if args.json:
        print(json.dumps(entries, indent=2))
    elif entries:
        print(format_table([*_OF_OFFER, "status"], entries))
    else:
        print("no plugins are installed; try: pip install kvtier-disk")
    return int(args.load and any(said.startswith(BROKEN) for _, said in offers))
