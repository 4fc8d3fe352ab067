"""``kvtier run``: completes the prompts of a file, reusing whatever the tiers hold from earlier runs.

Decides what is printed and in what order things are checked: settings and prompts before the model is loaded, the
length of every prompt before the first one runs. A line that can't be run stops everything before it starts, or is
told and left out where that was asked for. Knows no engine: their packages offer a ``Model``.
"""

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from kvtier.arguments import add_engine_arguments, positive
from kvtier.engines import Engine, Model, find_engine, hand_over, load_model
from kvtier.prompts import PromptLine, read_prompts
from kvtier_core import ConfigError, Settings, load_settings
from kvtier_core.engine import Generation, format_size, why_nothing_lasts
from kvtier_core.plugins.discovery import ENGINE_GROUP
from kvtier_core.settings import read_blocklist

help = "complete a file of prompts with a local model, reusing stored KV"  # noqa: A001 - the commands' interface

_log = logging.getLogger("kvtier.run")


_Tokenized = tuple[PromptLine, list[int], int]
"""A line, its prompt's tokens, and how many to add."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_engine_arguments(parser)
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="one JSON object a line: prompt, optional max_tokens, optional salt",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=128, metavar="N", help="tokens to complete with (default 128)"
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="leave out lines that can't be run, and end with status 1, instead of stopping before the first",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a completion")


def run(args: argparse.Namespace) -> int:
    """Complete every prompt, then wait until the tiers have everything; 1 when lines were left out.

    Raises ``ConfigError`` for wrong arguments, ``KvtierError`` when the tiers do not take everything in time.
    """
    left_out: list[ConfigError] = []

    def leave_out(error: ConfigError) -> None:
        left_out.append(error)
        print(f"kvtier: error: {error}; left out", file=sys.stderr)

    on_broken = leave_out if args.keep_going else None
    offer = find_engine(ENGINE_GROUP, args.engine, read_blocklist(args.config))
    lines = read_prompts(args.prompts, on_broken=on_broken)
    settings = load_settings(file=args.config)
    nothing = why_nothing_lasts(settings)
    if nothing is not None:
        print(f"kvtier: {nothing}", file=sys.stderr)

    with closing(load_model(offer, args.model)) as model:
        prompts = list(_tokenize(model, args.prompts, lines, args.max_tokens, on_broken))
        if not prompts:
            raise ConfigError(f"{args.prompts}: no line can be run: see the messages above")
        room = max(len(token_ids) + max_tokens for _, token_ids, max_tokens in prompts)
        with model.open_engine(max_tokens=room, settings=settings) as engine:
            _warn_of_little_room(engine, settings, prompts)
            _complete(model, engine, prompts, as_json=args.json)
            hand_over(engine)
    return 1 if left_out else 0


def _complete(model: Model, engine: Engine, prompts: Sequence[_Tokenized], *, as_json: bool) -> None:
    all_misses: Counter[str] = Counter()
    for line, token_ids, max_tokens in prompts:
        generation = engine.generate(token_ids, max_tokens=max_tokens, salt=line.salt)
        text = model.detokenize(generation.token_ids)
        misses = Counter(miss["reason"] for miss in generation.misses)
        all_misses += misses
        print(
            json.dumps(_record(line, generation, text, misses))
            if as_json
            else _paragraph(line, generation, text)
        )
    if all_misses and not as_json:
        print(_why_missed(all_misses))


def _tokenize(
    model: Model,
    path: Path,
    lines: Sequence[PromptLine],
    default_max_tokens: int,
    on_broken: Callable[[ConfigError], None] | None,
) -> Iterator[_Tokenized]:
    """Each prompt's tokens and how many to add.

    Raises ``ConfigError`` for one that is empty or that the model's context can't hold, or hands that to *on_broken*.
    """
    limit = model.context_tokens
    for line in lines:
        token_ids = model.tokenize(line.prompt)
        max_tokens = line.max_tokens or default_max_tokens
        problem = None
        if not token_ids:
            problem = "the prompt has no tokens"
        elif len(token_ids) + max_tokens > limit:
            problem = (
                f"{len(token_ids)} prompt tokens and {max_tokens} more exceed the model's context of {limit}: shorten "
                "the prompt or lower max_tokens"
            )
        if problem is None:
            yield line, token_ids, max_tokens
            continue
        error = ConfigError(f"{path}, line {line.number}: {problem}")
        if on_broken is None:
            raise error
        on_broken(error)


def _warn_of_little_room(engine: Engine, settings: Settings, prompts: Sequence[_Tokenized]) -> None:
    line, token_ids, _ = max(prompts, key=lambda prompt: len(prompt[1]))
    pool, block_size = engine.stats()["pool"], settings.pool.block_size
    blocks = len(token_ids) // block_size
    for name in settings.enabled_tiers:
        capacity = settings.tier_types[name].cls.info.resolve_capacity(settings.tiers[name].capacity)
        if capacity is not None and capacity < blocks * pool["row_bytes"]:
            _log.warning(
                "tiers.%s.capacity is %s, but the prompt of line %d, the longest, takes %s: not all of it can be kept, "
                "and a later run may find nothing of it; set tiers.%s.capacity to more than that",
                name,
                format_size(capacity),
                line.number,
                format_size(blocks * pool["row_bytes"]),
                name,
            )
    if blocks > pool["rows"]:
        _log.warning(
            "pool.capacity holds %d tokens, but the prompt of line %d has %d: the rest of it can't be restored and is "
            "computed every time; set pool.capacity to at least %dKiB",
            pool["rows"] * block_size,
            line.number,
            len(token_ids),
            blocks * pool["row_bytes"] // 1024,
        )


def _record(
    line: PromptLine, generation: Generation[Any], text: str, misses: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "line": line.number,
        "text": text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "hit_tokens": generation.hit_tokens,
        "hits_by_tier": dict(generation.hits_by_tier),
        "misses": dict(misses),
        "ttft_s": generation.ttft_s,
        "seconds": generation.seconds,
    }


def _paragraph(line: PromptLine, generation: Generation[Any], text: str) -> str:
    sources = ", ".join(f"{tokens} from {source}" for source, tokens in generation.hits_by_tier.items())
    return (
        f"[line {line.number}] {generation.prompt_tokens} prompt tokens, {generation.hit_tokens} restored"
        f"{f' ({sources})' if sources else ''}, first token {generation.ttft_s:.2f} s\n{text}\n"
    )


def _why_missed(misses: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(misses.items()))
    return f"blocks at which lookups ended, by why they missed: {reasons}"
