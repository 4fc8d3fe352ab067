"""kvtier beside LMCache, vLLM's own tiering and lifeboatcache, in one vLLM on one machine: ``nox -s peers``.

``python benchmarks/peers.py [--json] [--quick] [--ways ...] [--parts ...]``, with an interpreter that has vLLM 0.32 for
CPUs, kvtier, SmolLM2 and the peers. One that is missing or does not start is a line that says so.

- ``reload``: prompts of 1,281 and 3,841 tokens, of which every way keeps all but one token, and of 4,000, of which each
  keeps whole units of its own size. *Excess* is the time to the first token beyond that from the device's cache a
  moment later: from host memory; in a new process from files as they were left; and from files dropped from the page
  cache. The first load of each process warms up.
  After each way the *floor* is taken: as many bytes read past the page cache and copied once, with nothing around it.
- ``conversations``: eight in turns, of which the device's cache holds a part; tokens a second, in rounds. vLLM without
  connector has a cache that holds all of them: it computes as many tokens, and stores and loads nothing.
- ``faults``: see ``peers_faults``.

Printed are medians with 95 % intervals by resampling. ``ratios`` are ours over theirs: of seconds, less is better; of
tokens a second, more. A ratio is null where a median is 0 or less: that is noise.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from measuring import interval, print_intervals, token_bytes, tokens
from peers_faults import Faults
from peers_ways import BLOCK, HOST_BYTES, WAYS, Running, Way, stored_bytes
from vllm_limit import Limit

from kvtier_transformers.demo.files import drop_page_cache
from tests.vllm.engines import EngineError

EQUAL = (1281, 3841)
UNEQUAL = 4000
WARM_UP = 513
RELOADS = 3
"""From host memory, of each prompt; and of the floor, after each way."""
DEVICE_BLOCKS = 72
FEW_DEVICE_BLOCKS = 28
CONVERSATIONS, TURNS, FIRST_TURN, NEXT_TURN, AT_ONCE = 8, 3, 600, 200, 2
PARTS = ("reload", "conversations", "faults")
Say = Callable[[str], None]
Sample = dict[str, float]


class Reloads:
    """Time to the first token, of one way after another."""

    def __init__(
        self, model: Path, place: Path, prompts: Sequence[list[int]], options: dict[str, Any]
    ) -> None:
        self._model, self._place, self._options = model, place, options
        self._prompts = prompts
        self._token_bytes = token_bytes(model, options["dtype"])
        self.floors: dict[str, list[float]] = {str(length): [] for length in EQUAL}
        """Seconds that reading and copying a prompt's bytes took, by its tokens."""

    def take_floor(self) -> None:
        """One sample of the floor for each length."""
        for length, samples in self.floors.items():
            place = self._place / f"floor-{length}"
            limit = Limit(self._model, self._options["dtype"], int(length) // BLOCK, BLOCK, place)
            samples.append(limit.measure(RELOADS)["excess_disk_s"])
            limit.close()
            place.rmdir()

    def measure(self, way: Way) -> dict[str, Any]:
        """All samples of one way, one for each prompt, and what its processes and files took."""
        root = self._place / way.name
        samples: list[Sample] = []
        warm_up = tokens("warm-up", WARM_UP)
        with self._running(way, root) as running:
            running.engine.call("timed", prompt=warm_up)
            stored = (WARM_UP - 1) // way.unit * way.unit
            for prompt in self._prompts:
                stored += (len(prompt) - 1) // way.unit * way.unit
                samples.append(self._first(running, prompt, stored * self._token_bytes))
            found: dict[str, Any] = {"start_s": running.start_s, "pss_bytes": running.pss_bytes()}
        found |= {"disk_bytes": stored_bytes(root), "kv_bytes": stored * self._token_bytes}
        if way.outlives and way.name != "none":
            for place in ("left", "dropped"):
                if place == "dropped":
                    drop_page_cache(root)
                with self._running(way, root) as running:
                    running.engine.call("timed", prompt=warm_up)
                    for prompt, sample in zip(self._prompts, samples, strict=True):
                        sample.update(_excess(running, prompt, place))
        self.take_floor()
        return {**found, "samples": samples}

    def _running(self, way: Way, root: Path) -> Running:
        return Running(
            way,
            self._model,
            root,
            self._place / f"{way.name}.log",
            max_model_len=4224,
            num_gpu_blocks_override=DEVICE_BLOCKS,
            **self._options,
        )

    def _first(self, running: Running, prompt: list[int], stored: int) -> Sample:
        """One prompt, cold; then from host memory."""
        cold_s = running.engine.call("timed", prompt=prompt)["seconds"]
        sample = {"tokens": len(prompt), "cold_s": cold_s}
        if running.way.name == "none":
            return sample
        running.wait_stored(stored)
        reloads = []
        for _ in range(RELOADS):
            running.forget_device()
            reloads.append(_excess(running, prompt, "host"))
        return sample | {figure: statistics.median(each[figure] for each in reloads) for figure in reloads[0]}


def _excess(running: Running, prompt: list[int], place: str) -> Sample:
    """What the prompt takes beyond the device's cache, and how much of it was found."""
    loaded = running.engine.call("timed", prompt=prompt)
    device_s = statistics.median(running.engine.call("timed", prompt=prompt)["seconds"] for _ in range(3))
    return {f"{place}_s": loaded["seconds"] - device_s, f"{place}_cached": loaded["cached"]}


def converse(
    start: Callable[[Way], Running], ways: Sequence[Way], rounds: int, absent: dict[str, str], say: Say
) -> dict[str, Any]:
    """Tokens a second of each way, in every round; the first warms up. All run side by side and take turns."""
    with ExitStack() as stack:
        engines: dict[str, Running] = {}
        for way in ways:
            try:
                engines[way.name] = stack.enter_context(start(way))
            except EngineError as error:
                absent[way.name] = f"it did not start: {_last_line(error)}"
        found: dict[str, Any] = {name: {"rounds": []} for name in engines}
        for number in range(rounds + 1):
            order = random.Random(number).sample(list(engines), len(engines))
            for name in order:
                rate = _conversations(engines[name], number)
                say(f"conversations {number}, {name}: {rate:.0f} tokens/s")
                if number:
                    found[name]["rounds"].append(rate)
        for name, running in engines.items():
            found[name] |= {"pss_bytes": running.pss_bytes(), "disk_bytes": stored_bytes(running.root)}
    return found


def _conversations(running: Running, number: int) -> float:
    """Tokens of all prompts by the seconds they took."""
    texts = [
        tokens(f"talk {number} {index}", FIRST_TURN + TURNS * NEXT_TURN) for index in range(CONVERSATIONS)
    ]
    seconds, served = 0.0, 0
    for turn in range(TURNS):
        length = FIRST_TURN + turn * NEXT_TURN
        order = random.Random(f"{number} {turn}").sample(texts, len(texts))
        prompts = [text[:length] for text in order]
        seconds += running.engine.call("throughput", prompts=prompts, at_once=AT_ONCE)["seconds"]
        served += sum(map(len, prompts))
    return served / seconds


def summarize(raw: dict[str, Any]) -> dict[str, Any]:
    """Figures with intervals, and the ratios that can be had."""
    figures: dict[str, Any] = {}
    for name, found in raw.get("reload", {}).items():
        for sample in found["samples"]:
            for figure, value in sample.items():
                if figure.endswith("_s"):
                    figures.setdefault(f"{name}.{figure[:-2]}_{sample['tokens']:.0f}", []).append(value)
    for name, found in raw.get("conversations", {}).items():
        figures[f"{name}.tokens_per_s"] = found["rounds"]
    figures = {figure: interval(values) for figure, values in figures.items()}

    def best(figure: str, product: str | None, pick: Callable[[Sequence[float]], float]) -> float | None:
        theirs = [
            figures[f"{way.name}.{figure}"]["median"]
            for way in WAYS.values()
            if way.product not in ("none", "kvtier")
            and product in (None, way.product)
            and f"{way.name}.{figure}" in figures
        ]
        return pick(theirs) if theirs else None

    wanted = {
        "host_3841_vs_lmcache": ("host_3841", "lmcache", min),
        "disk_3841_vs_lmcache": ("dropped_3841", "lmcache", min),
        "warm_files_3841_vs_best": ("left_3841", None, min),
        "conversations_vs_lmcache": ("tokens_per_s", "lmcache", max),
    }
    ratios: dict[str, float | None] = {}
    for ratio, (figure, product, pick) in wanted.items():
        ours, theirs = figures.get(f"kvtier.{figure}"), best(figure, product, pick)
        if ours and theirs is not None:
            ratios[ratio] = _over(ours["median"], theirs)
    wrong = {
        name: {case: one["wrong"] for case, one in cases.items() if "wrong" in one}
        for name, cases in raw.get("faults", {}).items()
    }
    floor = _floor(raw.get("floor", {}), figures, best)
    return {"ratios": ratios, "floor": floor, "wrong": wrong, "figures": figures}


def _floor(
    samples: dict[str, list[float]],
    figures: dict[str, Any],
    best: Callable[[str, str, Callable[[Sequence[float]], float]], float | None],
) -> dict[str, Any]:
    """Over the best of LMCache: bare reads and copies of as many bytes, and conversations without store or load."""
    floor_s = {length: interval(found) for length, found in samples.items() if found}
    floor: dict[str, Any] = {"floor_s": floor_s}
    for ratio, at, figure, pick in (
        ("disk_3841_vs_lmcache", floor_s.get("3841"), "dropped_3841", min),
        ("conversations_vs_lmcache", figures.get("none.tokens_per_s"), "tokens_per_s", max),
    ):
        if at and (theirs := best(figure, "lmcache", pick)) is not None:
            floor[ratio] = _over(at["median"], theirs)
    return floor


def _over(ours: float, theirs: float) -> float | None:
    """None: a median of 0 or less is noise, and a ratio of it says nothing."""
    return round(ours / theirs, 3) if min(ours, theirs) > 0 else None


def machine(dtype: str, threads: int) -> dict[str, Any]:
    """Where it ran."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "dtype": dtype,
        "threads": threads,
        "host_bytes": HOST_BYTES,
    }


def find_model(chosen: Path | None, place: Path) -> Path:
    """The one that was named, or SmolLM2 as vLLM can load it."""
    if chosen is not None:
        return chosen
    from vllm_model import save_smollm2  # noqa: PLC0415 - what it needs, --model does without

    return save_smollm2(place / "model")


def run(options: argparse.Namespace, place: Path, say: Say) -> dict[str, Any]:
    """Every part, as one JSON object."""
    absent = {name: why for name in options.ways if (why := WAYS[name].missing())}
    ways = [WAYS[name] for name in options.ways if name not in absent]
    engine_options = {"threads": options.threads, "dtype": options.dtype}
    raw: dict[str, Any] = {}

    def each(part: str, work: Callable[[Way], Any], chosen: Sequence[Way]) -> None:
        raw[part] = {}
        for way in random.Random(part).sample(chosen, len(chosen)):
            if way.name in absent:
                continue
            try:
                raw[part][way.name] = work(way)
            except EngineError as error:
                absent[way.name] = f"it did not start or ended: {_last_line(error)}"
            say(f"{part}, {way.name}: {raw[part].get(way.name, absent.get(way.name))}")

    model = find_model(options.model, place)
    if "reload" in options.parts:
        lengths = [length for length in EQUAL for _ in range(options.prompts)] + [UNEQUAL] * options.unequal
        prompts = [tokens(f"{number} {length}", length) for number, length in enumerate(lengths)]
        timed = [way for way in ways if way.is_timed]
        reloads = Reloads(model, place, prompts, engine_options)
        each("reload", reloads.measure, timed)
        raw["floor"] = reloads.floors
    if "conversations" in options.parts:
        chosen = [way for way in ways if way.is_timed and way.name not in absent]

        def start(way: Way) -> Running:
            return Running(
                way,
                model,
                place / f"talk-{way.name}",
                place / f"talk-{way.name}.log",
                max_model_len=FEW_DEVICE_BLOCKS * BLOCK // 2,
                num_gpu_blocks_override=DEVICE_BLOCKS if way.name == "none" else FEW_DEVICE_BLOCKS,
                **engine_options,
            )

        raw["conversations"] = converse(start, chosen, options.rounds, absent, say)
    if "faults" in options.parts:
        (place / "faults").mkdir()
        faults = Faults(place / "faults", options.threads, say)
        first = {way.product: way for way in reversed(ways) if way.outlives and way.name != "none"}
        each("faults", faults.run, list(first.values()))
    return {
        **summarize(raw),
        "peers": {
            ("vllm" if way.name == "none" else way.product): way.product_version()
            for way in ways
            if way.name not in absent
        },
        "absent": absent,
        "notes": {way.name: way.note for way in ways if way.note},
        "machine": machine(options.dtype, options.threads),
        "raw": raw,
    }


def _last_line(error: EngineError) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="one prompt of each length, two rounds")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="who is compared")
    parser.add_argument("--prompts", type=int, default=3, help="prompts of 1,281 and of 3,841 tokens each")
    parser.add_argument("--unequal", type=int, default=1, help="prompts of 4,000 tokens")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of conversations")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each engine")
    parser.add_argument(
        "--dtype", default="float32", help="of weights and KV; bfloat16 is slow where it is emulated"
    )
    parser.add_argument("--model", type=Path, help="a transformers directory; default SmolLM2")
    parser.add_argument("--directory", type=Path, help="where to store (default: a temporary directory)")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.rounds = 1, 2

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir=options.directory, prefix="kvtier-bench-") as name:
        result = run(options, Path(name), say)
    if options.json:
        print(json.dumps(result))
        return
    print_intervals(result["figures"])
    for part in ("ratios", "floor", "wrong", "peers", "absent"):
        print(part, json.dumps(result[part], indent=1))


if __name__ == "__main__":
    main()
