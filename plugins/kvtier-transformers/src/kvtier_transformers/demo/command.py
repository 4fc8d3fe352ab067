"""``kvtier demo``: what a warm tier is worth, shown on a real model.

Decides the order of events: plain, tiers empty and pool in one process; then, for every question, a new process with
an empty pool and the disk's page cache dropped. Imports nothing heavy until it runs.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier_core import ConfigError

help = "show on a real model what kvtier saves: no cache, pool and disk side by side"  # noqa: A001 - the commands' interface

_MIN_TOKENS, _MAX_TOKENS = 64, 7936
"""At least a few blocks; at most what leaves room for question and answer in SmolLM2's 8192."""

_OVERHEAD_PAIRS = 10


def _token_count(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if not _MIN_TOKENS <= count <= _MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {_MIN_TOKENS} to {_MAX_TOKENS}")
    return count


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--tokens",
        type=_token_count,
        default=4096,
        metavar="N",
        help="tokens of the shared text (default 4096)",
    )
    parser.add_argument(
        "--corrupt",
        action="store_true",
        help="flip a bit in some stored files before the new process reads them",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="work in DIR, which must be new or empty, and keep it"
    )
    parser.add_argument(
        "--threads", type=_positive, metavar="N", help="threads the model runs on (default: torch's)"
    )
    parser.add_argument(
        "--overhead-pairs",
        type=_positive,
        metavar="N",
        help="also compare the CPU time of N cold runs with empty tiers and N without kvtier, in turns "
        f"(default with --json: {_OVERHEAD_PAIRS}, else none)",
    )


def _pairs(args: argparse.Namespace) -> int:
    pairs: int | None = args.overhead_pairs
    if pairs is not None:
        return pairs
    return _OVERHEAD_PAIRS if args.json else 0


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as directory:
            yield Path(directory)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        empty = not any(keep.iterdir())
    except OSError as error:
        raise ConfigError(f"--keep {keep}: cannot be used: {error.strerror}") from error
    if not empty:
        raise ConfigError(f"--keep {keep}: the directory is not empty: name a new one")
    yield keep.resolve()


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when every answer is identical to the one without kvtier, else 1."""
    # the commands' interface wants an import that costs nothing; these cost a second
    from rich.console import Console  # noqa: PLC0415

    from kvtier_transformers.demo.show import Show  # noqa: PLC0415

    with _workplace(args.keep) as directory:
        show = Show(
            directory,
            Console(stderr=True),
            prefix_tokens=args.tokens,
            corrupt=args.corrupt,
            threads=args.threads,
            overhead_pairs=_pairs(args),
        )
        results, summary = show.run()
    if args.json:
        print(json.dumps(summary.to_json()))
    else:
        Console().print(results.render(summary))
    return 0 if summary.identical else 1
