"""``kvtier certify``: compares what an engine answers from restored KV with what it answers without kvtier.

Decides what is printed and the exit status: 0 certified, 1 not, 2 where it can't be run. The configured tiers' own
storage is never touched.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.arguments import positive
from kvtier.certify.drivers import Opening
from kvtier.certify.scenarios import SCENARIOS, Certification
from kvtier.certify.storage import Storage, reason_of
from kvtier.certify.verdicts import Row, why_not_certified
from kvtier.engines import find_engine
from kvtier.table import format_table
from kvtier_core.errors import ConfigError, KvtierError
from kvtier_core.plugins.discovery import CERTIFY_GROUP
from kvtier_core.settings import load_settings, read_blocklist

help = "Compare an engine's answers from restored KV with its answers without kvtier."  # noqa: A001 - the command protocol


def _scenarios(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SCENARIOS)}")
    return names


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError('not a JSON object such as {"block_size": 32}')
    return options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--engine", required=True, metavar="NAME", help="llama.cpp, sglang, transformers, vllm, or a plugin's"
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="a directory, or a .gguf file (llama.cpp, transformers)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="kvtier's settings (default: $KVTIER_CONFIG, or one disk tier)",
    )
    parser.add_argument(
        "--tokens", type=positive, default=512, metavar="N", help="tokens of the document (default 512)"
    )
    parser.add_argument(
        "--only",
        type=_scenarios,
        default=SCENARIOS,
        metavar="NAMES",
        help=f"scenarios to run after pool, separated by commas: {', '.join(SCENARIOS[1:])} (default all)",
    )
    parser.add_argument(
        "--engine-options",
        type=_options,
        default={},
        metavar="JSON",
        help="the engine's own options, as a JSON object: for vllm the arguments of LLM, for sglang of Engine",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")


def run(args: argparse.Namespace) -> int:
    """Run the scenarios; 0 when the engine is certified, else 1.

    Raises ``ConfigError`` or ``PluginError`` where it can't be run.
    """
    settings = load_settings(file=args.config)
    blocked = read_blocklist(args.config)
    if not args.model.exists():
        raise ConfigError(f"{args.model}: no such model: give a directory with config.json or a .gguf file")
    find_engine(CERTIFY_GROUP, args.engine, blocked)
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="kvtier-certify-") as name:
            storage = Storage(Path(name), settings)
            opening = Opening(
                model=args.model.resolve(),
                max_tokens=args.tokens,
                config=settings.file,
                overrides=storage.overrides,
                engine_options=args.engine_options,
                workplace=Path(name),
            )
            certification = Certification(
                args.engine,
                blocked,
                opening,
                storage,
                resets_all=settings.on_reset == "all",
                say=_say,
            )
            for row in certification.run(args.only):
                rows.append(row)
                _say(f"{row.scenario}: {_verdict(row)}")
    except KvtierError as error:
        raise ConfigError(str(error)) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(
            f"certify can't go on: {reason_of(error)}. Where that is about its temporary directory, set TMPDIR to a "
            "writable one with room for three times what the tiers store of the document"
        ) from error
    problem = why_not_certified(rows)
    if args.json:
        print(json.dumps(_report(args, certification, rows, problem)))
    else:
        print(_as_text(certification, rows, problem))
    return 0 if problem is None else 1


def _say(text: str) -> None:
    print(f"kvtier: {text}", file=sys.stderr, flush=True)


def _verdict(row: Row) -> str:
    return f"{row.verdict}: {row.why}" if row.why else row.verdict


def _report(
    args: argparse.Namespace, certification: Certification, rows: Sequence[Row], problem: str | None
) -> dict[str, Any]:
    reference = certification.reference
    return {
        "certified": problem is None,
        "why_not": problem,
        "engine": args.engine,
        "model": str(args.model),
        "tokens": reference.document.cuts[-1],
        "tokens_per_block": reference.document.tokens_per_block,
        "dtype": certification.dtype,
        "noise": reference.noise,
        "tolerance": reference.tolerance,
        "wrong_kv_shows_as": reference.control,
        "rows": [row.to_json() for row in rows],
    }


def _as_text(certification: Certification, rows: Sequence[Row], problem: str | None) -> str:
    reference = certification.reference
    table = [
        {
            "scenario": row.scenario,
            "restored": "-" if row.restored is None else row.restored_tokens,
            "from": ", ".join(row.restored or ()) or "-",
            "difference": "-" if row.difference is None else f"{row.difference:.1e} at {row.at}",
            "tolerance": "-" if row.tolerance is None else f"{row.tolerance:.1e}",
            "verdict": _verdict(row).partition("\n")[0],  # all of it was said when it was known
        }
        for row in rows
    ]
    asked, per_block = reference.document.cuts, reference.document.tokens_per_block
    head = (
        f"{len(asked)} prompts of up to {asked[-1]} tokens in {certification.dtype}, blocks of {per_block}; other KV "
        f"in one block shows as {reference.control:.1e}"
    )
    return "\n".join([head, "", format_table(list(table[0]), table), "", problem or "certified"])
