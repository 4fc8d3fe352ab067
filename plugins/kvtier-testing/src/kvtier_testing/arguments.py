"""Arguments that the commands of this package share."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvtier_core.units import parse_duration, parse_size

_T = TypeVar("_T", int, float)


def add_tier(parser: argparse.ArgumentParser) -> None:
    """Which tier of which configuration."""
    parser.add_argument("tier", metavar="TIER", help="the tier's name in the configuration")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the TOML file (default: the one KVTIER_CONFIG names, if any)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def duration(text: str) -> float:
    """A time above 0."""
    return _above_0(parse_duration, text, '"10m"')


def size(text: str) -> int:
    """A size above 0."""
    return _above_0(parse_size, text, '"64MiB"')


def _above_0(parse: Callable[[str], _T], text: str, example: str) -> _T:
    try:
        value = parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not value:
        raise argparse.ArgumentTypeError(f"must be more than 0, such as {example}")
    return value
