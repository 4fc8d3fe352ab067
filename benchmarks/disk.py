"""How fast the disk tier is, beside fio and, with ``--against vllm``, vLLM's ``fs`` tier, in one run.

``python benchmarks/disk.py [--json] [--against vllm] [--directory DIR]``. Every contender moves the same bytes with
blocks of the same size, past the page cache, in jobs of the same size, in another order in every round; the first round
only warms up. What is printed are medians. fio (Debian's package) writes and reads a file that is there already,
once with 16 blocks in flight and one sync at the end, and once (``fio_synced``) as a tier has to: threads with one call
each, and a sync after every call. vLLM's tier (``BENCH_VLLM_PYTHON`` names an interpreter that has vLLM 0.32) makes its
directories as it goes, and its files are removed between rounds, which is not timed. ``bare`` makes our tier's calls
with nothing around them: its processor time is the least there is here.

``integrity_and_index_cost`` is how much longer our tier takes with its index and the core's proofs
(``ours_with_proofs``) than without both (``ours_plain``), as a fraction.

Decides what is measured; the contenders are in ``disk_contenders`` and ``disk_ours``.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from disk_contenders import Fio, FioSynced, Vllm
from disk_ours import Ours, OursPlain, OursWithProofs

from kvtier_testing.bench.measuring import (
    Passes,
    cpu_s_per_gib,
    kernel_s_per_gib,
    measure,
    ratio,
    summarize_passes,
)
from kvtier_testing.bench.plain_file import Bare
from kvtier_testing.bench.rows import Contender, Rows

SIZES = {"128KiB": 128 << 10, "1MiB": 1 << 20, "8MiB": 8 << 20}
JOB_BYTES = 4 << 20


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, object]:
    """Everything, as one JSON object."""
    results: dict[str, object] = {}
    ratios: dict[str, float] = {}
    cpu: dict[str, float] = {}
    cost: dict[str, float] = {}
    for size, row_bytes in {size: SIZES[size] for size in arguments.sizes}.items():
        rows = Rows(row_bytes, max(arguments.bytes, 4 * row_bytes), JOB_BYTES)
        contenders: list[Contender] = [
            Ours(directory, arguments.threads),
            Fio(directory),
            FioSynced(directory, arguments.threads),
            Bare(directory, arguments.threads),
            OursWithProofs(directory, arguments.threads),
            OursPlain(directory, arguments.threads),
        ]
        if arguments.against == "vllm":
            contenders.append(Vllm(directory, os.environ["BENCH_VLLM_PYTHON"]))
        try:
            measured = measure(contenders, rows, arguments.rounds)
        finally:
            for contender in contenders:
                contender.close()
            rows.close()
        results |= summarize_passes(size, measured, rows)
        for what in ("store", "load"):
            for other in ("fio", "fio_synced", "bare"):
                ratios[f"{what}_{size}_vs_{other}"] = ratio(measured, what, other, "ours")
            ratios[f"{what}_{size}_with_proofs_vs_bare"] = ratio(measured, what, "bare", "ours_with_proofs")
            cost[f"{what}_{size}"] = round(ratio(measured, what, "ours_with_proofs", "ours_plain") - 1, 3)
            if arguments.against == "vllm":
                ratios[f"{what}_{size}_vs_vllm"] = ratio(measured, what, "vllm", "ours")
            cpu[f"{what}_{size}"] = cpu_s_per_gib(measured["ours", what], rows)
        if not arguments.json:
            print_size(size, measured, rows)
    return {
        "ratios": ratios,
        "cpu_s_per_gib": max(cpu.get("store_1MiB", 0.0), cpu.get("load_1MiB", 0.0)),
        "cpu_s_per_gib_by_size": cpu,
        "integrity_and_index_cost": cost,
        "results": results,
    }


def print_size(size: str, measured: Passes, rows: Rows) -> None:
    """One block size, for people."""
    for (name, what), all_ in measured.items():
        rates = sorted(rows.total_bytes / one.seconds / 1e6 for one in all_)
        print(
            f"{size:>7} {what:<5} {name:<17} {statistics.median(rates):7.0f} MB/s"
            f" ({rates[0]:.0f}-{rates[-1]:.0f})  {cpu_s_per_gib(all_, rows):.3f} CPU s/GiB"
            f" ({kernel_s_per_gib(all_, rows)} in the kernel)",
            flush=True,
        )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    parser.add_argument("--against", choices=["vllm"], help="also measure this one")
    parser.add_argument("--directory", type=Path, help="where to store (default: a temporary directory)")
    parser.add_argument(
        "--bytes", type=int, default=512 << 20, help="bytes moved each time (default 512 MiB)"
    )
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="block sizes (default all)"
    )
    parser.add_argument(
        "--threads", type=int, default=8, help="I/O threads of our tier and of bare (default 8)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the first (default 5)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kvtier-bench-") as directory:
        result = run(arguments, Path(directory))
    print(json.dumps(result if arguments.json else result["ratios"]))


if __name__ == "__main__":
    main()
