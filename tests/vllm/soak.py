"""A long soak of real vLLM: random requests and resets, each answer compared with an engine without connector.

``python -m tests.vllm.soak --requests 4000 --json``, in the environment of ``nox -s vllm``. All is drawn from
``--seed``: requests that share prefixes and come again, some of them aborted, with a salt, several completions or
log-probabilities; resets of all four kinds, with and without running requests, alone and in bursts. Half of the
requests go to a tiny Llama, half to a tiny Gemma 3 with sliding windows. Device and pool are small, and every few
hundred requests a new engine goes on with the same disk. How fast tiers are is not drawn: a seed replays the same
requests and resets, not quite the same steps. With ``--simulated-gpu`` the KV is taken to be on one (see ``on_a_gpu``),
and every other engine schedules asynchronously, as vLLM does on GPUs. The last line is JSON. A wrong answer, an engine
that stops, and one that holds blocks when all is over, make the exit status 1.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm.engines import BLOCK, EngineProcess, assert_all_is_over, connector, disk, prompt
from tests.vllm.models import save_hybrid_model, save_tiny_model

PART = 250
"""Requests served by one engine."""
_PART_ON_GPU = 150
"""Fewer, because a simulated GPU takes its time."""
LOGPROB_TOLERANCE = 0.01
KINDS = [
    {"running": running, "connector": connector} for running in (False, True) for connector in (False, True)
]


@dataclass(frozen=True)
class Model:
    save: Callable[..., Path]
    device_blocks: int
    chunk_blocks: Sequence[int]
    """Of vLLM's blocks in one of kvtier's; one of them is drawn."""


MODELS = {
    "llama": Model(save_tiny_model, 60, (1, 1, 2)),
    "gemma3": Model(save_hybrid_model, 100, (1,)),
}


@dataclass
class Tally:
    """What one model's parts came to."""

    answers: int = 0
    mismatches: int = 0
    stops: int = 0
    preemptions: int = 0
    aborts: int = 0
    asynchronous: int = 0
    """Answers of engines that schedule so."""
    hit_blocks: Counter[str] = field(default_factory=Counter)
    resets: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        return {
            **{
                name: getattr(self, name)
                for name in ("answers", "mismatches", "stops", "preemptions", "aborts", "asynchronous")
            },
            "resets": self.resets.total(),
            "hit_blocks": self.hit_blocks.total(),
            "hits": dict(self.hit_blocks),
            "kinds_of_resets": dict(self.resets),
        }


class Draw:
    """Everything that one part does, drawn from its seed."""

    def __init__(self, seed: str, model: Model, count: int) -> None:
        self._random = random.Random(seed)
        draw = self._random
        prefixes = [self._prompt(draw.randint(4, 8), 0) for _ in range(6)]
        self._known = [self._longer(draw.choice(prefixes)) for _ in range(16)]
        self._prefixes = prefixes
        self.requests = [self._request() for _ in range(count)]
        self.aborts = {str(number): draw.randint(1, 20) for number in range(count) if draw.random() < 0.06}
        self.resets = self._resets(count)
        self.at_once = draw.choice((4, 6, 8))
        self.extra = {
            "offload_prompt_only": draw.random() < 0.5,
            "blocks_per_chunk": draw.choice(model.chunk_blocks),
        }
        self.options: dict[str, Any] = {
            "num_gpu_blocks_override": model.device_blocks,
            **draw.choice(({}, {"max_num_batched_tokens": 256})),
        }
        self.on_reset = draw.choice(("pool", "pool", "all"))

    def _prompt(self, blocks: int, extra: int) -> list[int]:
        return prompt(self._random.randrange(1 << 30), blocks=blocks, extra=extra)

    def _longer(self, prefix: list[int]) -> list[int]:
        return [*prefix, *self._prompt(self._random.randint(0, 3), self._random.randrange(BLOCK))]

    def _request(self) -> dict[str, Any]:
        draw = self._random
        is_known = draw.random() < 0.7
        request: dict[str, Any] = {
            "prompt": draw.choice(self._known) if is_known else self._longer(draw.choice(self._prefixes)),
            "max_tokens": draw.choices((1, 8, 24, 48, 140), (2, 3, 3, 1, 0.5))[0],
        }
        if draw.random() < 0.1:
            request["salt"] = draw.choice(("one", "another"))
        kind = draw.random()
        if kind < 0.06:
            # Several completions are not to be had greedily. vLLM's sampler with a seed fails on a CPU.
            request |= {"n": draw.randint(2, 3), "temperature": 1.0, "top_k": 1}
        elif kind < 0.14:
            request["logprobs"] = 1
        elif kind < 0.17:
            request["prompt_logprobs"] = 1
        return request

    def _resets(self, count: int) -> list[dict[str, Any]]:
        draw, resets, after = self._random, [], 0
        while (after := after + draw.randint(2, 14)) < count:
            kind = draw.choice(KINDS)
            if draw.random() < 0.2:
                resets.append({**kind, "after": after, "idle": True})
                continue
            for _ in range(draw.choice((1, 1, 1, 2, 6))):
                resets.append({**kind, "after": after, "later": draw.randint(0, 8)})
                kind = draw.choice((kind, draw.choice(KINDS)))
        return resets


def differ(said: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """Where an answer is not the expected one; ``None`` when it is."""
    for number, (mine, theirs) in enumerate(zip(said["tokens"], expected["tokens"], strict=True)):
        if mine != theirs:
            at = next(i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1])
            return f"completion {number}, token {at}: {mine[at]} instead of {theirs[at]}"
    for mine, theirs in zip(said.get("logprobs", ()), expected.get("logprobs", ()), strict=True):
        worst = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
        if worst > LOGPROB_TOLERANCE:
            return f"a log-probability is off by {worst:g}"
    return None


class Soak:
    """One model's engine with kvtier, beside one without connector."""

    def __init__(self, name: str, seed: int, directory: Path, gpu: dict[str, Any] | None = None) -> None:
        """*gpu*: for ``put_kv_on_a_gpu``, but for its seed."""
        self.tally = Tally()
        self._name, self._seed, self._gpu = name, seed, gpu
        self._directory = directory / name
        self._directory.mkdir()
        self._model = MODELS[name]
        self._saved = self._model.save(self._directory / "model")
        self._plain = EngineProcess(
            self._saved,
            self._directory / "plain.log",
            enable_prefix_caching=False,
            num_gpu_blocks_override=200,
        )

    def close(self) -> None:
        self._plain.close()

    def serve(self, part: int, count: int) -> None:
        """Serve part *part* of *count* requests."""
        draw = Draw(f"{self._seed} {self._name} {part}", self._model, count)
        if self._gpu is not None:
            draw.options["simulated_gpu"] = {"seed": part, **self._gpu}
        if is_asynchronous := self._gpu is not None and part % 2 > 0:
            draw.options["asynchronous"] = True
            draw.resets = [
                {**reset, "idle": True} for reset in draw.resets
            ]  # vLLM refuses them during a step
        with ThreadPoolExecutor(1) as other:
            right = other.submit(
                self._plain.call, "soak", requests=draw.requests, at_once=8, aborts={}, resets=[]
            )
            said = self._ask_kvtier(part, draw)
            expected = right.result()
        for number, answer in enumerate(said):
            if answer is None:
                self.tally.aborts += 1
                continue
            self.tally.answers += 1
            self.tally.asynchronous += is_asynchronous
            if (where := differ(answer, expected[number])) is not None:
                self.tally.mismatches += 1
                print(f"{self._name}, part {part}, request {number}: {where}", flush=True)

    def _ask_kvtier(self, part: int, draw: Draw) -> list[dict[str, Any] | None]:
        log = self._directory / f"{part}.log"
        settings = disk(self._directory / "root", pool="3MiB", on_reset=draw.on_reset)
        engine = None
        try:
            engine = EngineProcess(self._saved, log, connector(settings, **draw.extra), **draw.options)
            said = engine.call(
                "soak", requests=draw.requests, at_once=draw.at_once, aborts=draw.aborts, resets=draw.resets
            )
            books = engine.call("settle")
            assert_all_is_over(books)
            self.tally.hit_blocks.update(books["hits"])
            self.tally.resets.update(books["resets"])
            self.tally.preemptions += int(engine.call("metrics").get("vllm:num_preemptions", 0))
        except AssertionError as error:  # also an EngineError: the engine's program ended
            self.tally.stops += 1
            print(f"{self._name}, part {part}: {str(error)[-2000:]}", flush=True)
            return []
        finally:
            if engine is not None:
                engine.close()
        return said


def soak(
    requests: int, seed: int, models: Sequence[str], directory: Path, gpu: dict[str, Any] | None = None
) -> dict[str, Tally]:
    """Serve *requests*, shared out evenly among *models*; what came of it, by model. *gpu* as ``Soak`` takes it."""
    tallies = {}
    size = PART if gpu is None else _PART_ON_GPU
    for name in models:
        one = Soak(name, seed, directory, gpu)
        try:
            left = requests // len(models)
            for part in range(-(-left // size)):
                one.serve(part, min(size, left - part * size))
                print(f"{name}, part {part}: {json.dumps(one.tally.report())}", flush=True)
        finally:
            one.close()
        tallies[name] = one.tally
    return tallies


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=4000, help="in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="all is drawn from it (%(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--simulated-gpu", action="store_true", help="the KV is taken to be on one")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        gpu: dict[str, Any] | None = {} if options.simulated_gpu else None
        tallies = soak(options.requests, options.seed, options.models, Path(directory), gpu)
    reports = {name: tally.report() for name, tally in tallies.items()}
    totals = {
        key: sum(report[key] for report in reports.values())
        for key in (
            "answers",
            "mismatches",
            "stops",
            "resets",
            "preemptions",
            "aborts",
            "asynchronous",
            "hit_blocks",
        )
    }
    result = {"seed": options.seed, **totals, "models": reports}
    print(json.dumps(result) if options.json else json.dumps(result, indent=2))
    return 1 if totals["mismatches"] or totals["stops"] else 0


if __name__ == "__main__":
    sys.exit(main())
