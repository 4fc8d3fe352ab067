"""``kvtier run``: completes the prompts of a file, reusing whatever the tiers hold from earlier runs.

Decides what is printed and in what order things are checked: settings and prompts before the model is loaded, the
length of every prompt before the first one runs. Imports nothing heavy until it runs.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier_core import ConfigError, KvtierError
from kvtier_transformers.prompts import PromptLine, read_prompts

if TYPE_CHECKING:
    from kvtier_transformers.engine import Engine, Generation
    from kvtier_transformers.models import LoadedModel

help = "complete a file of prompts with a local model, reusing stored KV"  # noqa: A001 - the commands' interface

_FLUSH_TIMEOUT_S = 300.0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--model", type=Path, required=True, metavar="PATH", help="a transformers directory or a .gguf file"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="one JSON object a line: prompt, optional max_tokens, optional salt",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="kvtier's settings (default: $KVTIER_CONFIG)"
    )
    parser.add_argument(
        "--max-tokens", type=_positive, default=128, metavar="N", help="tokens to complete with (default 128)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a completion")


def run(args: argparse.Namespace) -> int:
    """Complete every prompt, then wait until the tiers have everything.

    Raises ``ConfigError`` for wrong arguments, ``KvtierError`` when the tiers do not take everything in time.
    """
    from kvtier_core import load_settings  # noqa: PLC0415 - only when this command runs

    lines = read_prompts(args.prompts)
    settings = load_settings(file=args.config)

    # torch and transformers: seconds, and only now needed
    from kvtier_transformers.engine import Engine  # noqa: PLC0415
    from kvtier_transformers.models import load  # noqa: PLC0415

    loaded = load(args.model)
    prompts = list(_tokenize(loaded, args.prompts, lines, args.max_tokens))
    room = max(len(token_ids) + max_tokens for _, token_ids, max_tokens in prompts)
    with Engine.open(loaded.model, max_tokens=room, config=settings, files=loaded.files) as engine:
        for line, token_ids, max_tokens in prompts:
            generation = engine.generate(token_ids, max_tokens=max_tokens, salt=line.salt)
            text = str(loaded.tokenizer.decode(generation.token_ids, skip_special_tokens=True))
            print(
                json.dumps(_record(line, generation, text))
                if args.json
                else _paragraph(line, generation, text)
            )
        _hand_over(engine)
    return 0


def _tokenize(
    loaded: "LoadedModel", path: Path, lines: Sequence[PromptLine], default_max_tokens: int
) -> Iterator[tuple[PromptLine, list[int], int]]:
    """Each prompt's tokens and how many to add. Raises ``ConfigError`` for one that the model's context can't hold."""
    limit: int = loaded.model.config.max_position_embeddings
    for line in lines:
        token_ids: list[int] = loaded.tokenizer.encode(line.prompt, verbose=False)
        max_tokens = line.max_tokens or default_max_tokens
        if len(token_ids) + max_tokens > limit:
            raise ConfigError(
                f"{path}, line {line.number}: {len(token_ids)} prompt tokens and {max_tokens} more exceed the model's "
                f"context of {limit}: shorten the prompt or lower max_tokens"
            )
        yield line, token_ids, max_tokens


def _record(line: PromptLine, generation: "Generation", text: str) -> dict[str, Any]:
    return {
        "line": line.number,
        "text": text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "hit_tokens": generation.hit_tokens,
        "hits_by_tier": dict(generation.hits_by_tier),
        "ttft_s": generation.ttft_s,
        "seconds": generation.seconds,
    }


def _paragraph(line: PromptLine, generation: "Generation", text: str) -> str:
    sources = ", ".join(f"{tokens} from {source}" for source, tokens in generation.hits_by_tier.items())
    return (
        f"[line {line.number}] {generation.prompt_tokens} prompt tokens, {generation.hit_tokens} restored"
        f"{f' ({sources})' if sources else ''}, first token {generation.ttft_s:.2f} s\n{text}\n"
    )


def _hand_over(engine: "Engine") -> None:
    if not engine.flush(_FLUSH_TIMEOUT_S):
        raise KvtierError(
            f"the completions are done, but the tiers did not take all blocks within {_FLUSH_TIMEOUT_S:g} s: a later "
            "run will compute some of them again"
        )
