"""``kvtier bench TIER``: how fast a configured tier stores and loads: through kvtier, alone, beside a plain file."""

import argparse
import json
import secrets
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtier_core.blocktier import BlockTier
from kvtier_core.errors import ConfigError, KvtierError
from kvtier_core.manager.guard import describe
from kvtier_core.masking import mask_text
from kvtier_core.settings import load_settings
from kvtier_core.units import format_size
from kvtier_testing.arguments import add_tier, size
from kvtier_testing.bench import picture
from kvtier_testing.bench.contenders import ThroughKvtier, TierAlone
from kvtier_testing.bench.measuring import Passes, measure, ratio, summarize_passes
from kvtier_testing.bench.plain_file import Bare
from kvtier_testing.bench.rows import Contender, Rows
from kvtier_testing.configured import ConfiguredTier, describe_left

help = (  # noqa: A001 - the command protocol
    "Measure how fast a configured tier stores and loads: through kvtier, by the tier's own calls, and a plain file on "
    "the same disk. It stores --bytes at a time, in namespaces of its own that are removed afterwards; a full tier "
    "makes room for them as it does for an engine."
)
_SIZES = {"128KiB": 128 << 10, "1MiB": 1 << 20, "8MiB": 8 << 20}
_JOB_BYTES = 4 << 20
_PATIENCE_S = 60.0
_PLACES = ("root", "path", "url")
"""Settings by which tiers name a directory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_tier(parser)
    parser.add_argument(
        "--bytes", type=size, default=64 << 20, metavar="SIZE", help="moved in a pass (default 64MiB)"
    )
    parser.add_argument(
        "--sizes", nargs="+", choices=_SIZES, default=list(_SIZES), help="sizes of a block (default all)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="rounds after the first, which warms up (default 3)",
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="also draw the result into FILE; needs kvtier-testing[svg]",
    )


def run(args: argparse.Namespace) -> int:
    """Measure; 0.

    Raises ``ConfigError``, ``PluginError``, ``TierOpenError``, or ``KvtierError`` where a pass failed.
    """
    tier = ConfiguredTier(load_settings(file=args.config), args.tier, _PATIENCE_S)
    if args.rounds < 1:
        raise ConfigError("--rounds must be at least 1")
    if args.svg:
        picture.require(args.svg)
    sizes = {name: _SIZES[name] for name in args.sizes}
    _require_room(tier, args.bytes, max(sizes.values()))
    token = secrets.token_hex(6)
    results: dict[str, object] = {}
    rates: dict[str, dict[tuple[str, str], list[float]]] = {}
    ratios: dict[str, float] = {}
    left: dict[str, str] = {}
    for name, row_bytes in sizes.items():
        alone = f"kvtier-bench-{token}-alone"  # a tier may check the proofs of what it stores by itself
        rows = Rows(row_bytes, max(args.bytes, row_bytes), _JOB_BYTES, alone)
        through = ThroughKvtier(tier, token, row_bytes, rows.payload_bytes)
        contenders: list[ThroughKvtier | TierAlone] = [through]
        if issubclass(tier.cls, BlockTier):
            contenders.append(TierAlone(tier, alone, row_bytes))
        measured = _measure(tier, rows, contenders, args.rounds, left)
        results |= summarize_passes(name, measured, rows)
        rates[name] = _rates(measured, rows)
        others = {other for other, _ in measured} - {ThroughKvtier.name}
        ratios |= {
            f"{what}_{name}_vs_{other}": ratio(measured, what, other, ThroughKvtier.name)
            for other in sorted(others)
            for what in ("store", "load")
        }
        if not args.json:
            _print_size(name, rates[name])
    if args.json:
        found = {"tier": args.tier, "bytes": args.bytes, "rounds": args.rounds, "ratios": ratios}
        print(json.dumps({**found, "results": results, "left_behind": left}, indent=2))
    else:
        if any(name.endswith(f"vs_{Bare.name}") for name in ratios):
            print("bare: plain calls to one file beside the tier's directory, from as many threads")
        for line in describe_left(left, f"kvtier-bench-{token}"):
            print(line)
    if args.svg:
        title = f"Tier {args.tier}: {format_size(args.bytes)} a pass, median and range of {args.rounds}"
        picture.draw(args.svg, title, rates, Bare.name)
    return 0


def _require_room(tier: ConfiguredTier, bytes_: int, row_bytes: int) -> None:
    capacity = tier.plan(row_bytes).capacity_bytes
    if capacity is not None and capacity < 2 * max(bytes_, row_bytes):
        raise ConfigError(
            f"tiers.{tier.name}.capacity = {format_size(capacity)} has no room for two passes of "
            f"{format_size(bytes_)}: move less with --bytes, or smaller blocks with --sizes"
        )


def _measure(
    tier: ConfiguredTier,
    rows: Rows,
    of_the_tier: Sequence[ThroughKvtier | TierAlone],
    rounds: int,
    left: dict[str, str],
) -> Passes:
    """Measure these, and a plain file where there is a place for it; *left* gets what could not be removed."""
    table = tier.settings.tiers[tier.name]
    contenders: list[Contender] = [*of_the_tier]
    with ExitStack() as stack:
        stack.callback(rows.close)
        if (place := _place_beside(table)) is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=place, prefix="kvtier-bench-"))
            contenders.append(Bare(Path(folder), table.threads))
        namespaces = [contender.namespace for contender in of_the_tier]
        stack.callback(lambda: left.update(tier.remove(namespaces, rows.row_bytes)))
        for contender in contenders:
            stack.callback(contender.close)
        try:
            return measure(contenders, rows, rounds)
        except KvtierError:
            raise
        except Exception as error:
            why = mask_text(describe(error), tier.secrets)
            raise KvtierError(f"tier {tier.name!r} could not be measured: {why}") from error


def _place_beside(settings: Any) -> Path | None:  # noqa: ANN401 - a tier's settings
    """The directory that the tier's is in, where it is on the same disk: a file of ours is no part of a tier's."""
    values = (getattr(settings, name, None) for name in _PLACES)
    given = next((str(value) for value in values if value is not None), "")
    path = Path(given.removeprefix("file://")).expanduser().absolute()
    if not given or "://" in given.removeprefix("file://") or not path.exists():
        return None
    return path.parent if path.parent.stat().st_dev == path.stat().st_dev else None


def _rates(measured: Passes, rows: Rows) -> dict[tuple[str, str], list[float]]:
    """MB/s of each round, sorted; stores first."""
    return {
        way: sorted(rows.total_bytes / one.seconds / 1e6 for one in measured[way])
        for way in sorted(measured, key=lambda way: (way[1] == "load", way))
    }


def _print_size(size: str, rates: Mapping[tuple[str, str], Sequence[float]]) -> None:
    for (contender, what), found in rates.items():
        print(
            f"{size:>6}  {what:<5}  {contender:<10}  {statistics.median(found):7.0f} MB/s"
            f"  ({found[0]:.0f} to {found[-1]:.0f})",
            flush=True,
        )
