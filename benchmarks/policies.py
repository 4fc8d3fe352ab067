"""How many blocks of a real trace each eviction policy finds in the pool, beside the best that any policy could.

Every request of the trace goes through the real coordinator: a lookup of its prefix, a load of what was found, a store
of the rest. Time and bytes play no part. The best possible is Belady's: whoever is needed again last leaves, and what
would be that one does not come in.

    python benchmarks/policies.py --trace conversation_trace.jsonl [--json] [--plot policies.svg]
"""

import argparse
import heapq
import json
import time
from collections.abc import Sequence
from pathlib import Path

from kvtier_core.coordinator import Coordinator, PoolLimits
from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.policies import BUILT_IN, make_policy
from kvtier_core.values import RequestInfo

FRACTIONS = (0.01, 0.05, 0.10, 0.25)
"""Pool sizes, as parts of the distinct blocks of the trace."""

Trace = Sequence[Sequence[int]]


def read_trace(path: Path) -> Trace:
    """The block ids of each request, in prefix order."""
    with path.open() as file:
        return [json.loads(line)["hash_ids"] for line in file]


def run_policy(name: str, num_rows: int, trace: Trace) -> int:
    """The blocks found in a pool of *num_rows* rows."""
    limits = PoolLimits(
        max_promotion_rows=1, max_cascade_rows=1, lease_timeout_s=float("inf"), device_timeout_s=float("inf")
    )
    coordinator = Coordinator(num_rows, make_policy(name, num_rows), [], limits)
    names = {block: make_offload_key(block.to_bytes(32, "big"), 0) for request in trace for block in request}
    piece = max(
        1, num_rows // 8
    )  # as the engine session does, so that a small pool takes a part of a long prompt
    hits = 0
    for number, blocks in enumerate(trace):
        keys = [names[block] for block in blocks]
        hits += _serve(coordinator, f"r{number}", keys, piece)
    coordinator.check()
    return hits


def _serve(coordinator: Coordinator, request: str, keys: Sequence[OffloadKey], piece: int) -> int:
    coordinator.new_request(RequestInfo(request_id=request), 0.0)
    found = coordinator.lookup(request, keys, 0.0).hits
    if found:
        coordinator.complete_load(coordinator.prepare_load(request, keys[:found]).job_id)
    for begin in range(found, len(keys), piece):
        stored = coordinator.prepare_store(request, keys[begin : begin + piece], 0.0)
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
    parser.add_argument("--trace", type=Path, required=True, help="a JSON object with hash_ids a line")
    parser.add_argument("--policies", default=",".join(BUILT_IN), help="names, separated by commas")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")
    parser.add_argument("--plot", type=Path, help="draw into this file; needs matplotlib")
    options = parser.parse_args()
    trace = read_trace(options.trace)
    distinct = len({block for request in trace for block in request})
    total = sum(map(len, trace))
    unbounded = 1 - distinct / total
    ratios = measure(trace, options.policies.split(","))
    print(f"{len(trace)} requests, {total} blocks, {distinct} of them distinct; unbounded {unbounded:.1%}")
    print("| policy |" + "".join(f" {size} |" for size in ratios["best"]))
    print("|---|" + "---|" * len(FRACTIONS))
    for name, line in ratios.items():
        print(f"| {name} |" + "".join(f" {ratio:.1%} |" for ratio in line.values()))
    if options.plot:
        plot(options.plot, ratios, unbounded)
    if options.json:
        result = {"requests": len(trace), "blocks": total, "distinct": distinct, "unbounded": unbounded}
        print(json.dumps({**result, "hit_ratio": ratios}))


if __name__ == "__main__":
    main()
