"""What a bucket costs on paper: requests, bytes, memory and money, from the tier's own constants and measured rates.

``python benchmarks/objectstore_model.py [--machines 10] [--blocks 10000000]`` prints the table of
docs/howto/object-store.md. Keys of a pack are those of a real pack; memory a block and CPU time a pack are measured on
a table of 1,000 packs. Prices are arguments, as Amazon listed them for S3 Standard in us-east-1.

Decides what is added up; it makes no request.
"""

import argparse
import time
import tracemalloc

from kvtier_core.tier import OffloadKey, format_size
from kvtier_fsspec.following import LATE_S, LIST_ALL_S, LISTED_A_SECOND
from kvtier_fsspec.keeper import TERM_S
from kvtier_fsspec.layout import LONGEST_SCAN_S
from kvtier_fsspec.object_tier import UPKEEP_S
from kvtier_fsspec.packs import Index, Pack, PackName, PackTable, most_blocks
from kvtier_testing.rows import similar_keys

_KEYS_A_LISTING = 1000
_MEASURED_PACKS = 1000
_MONTH_S = 30 * 86_400
_LIST_ENTRY_BYTES = 300
"""Of one object in S3's answer to a listing."""


def measure(blocks: int, row_bytes: int) -> tuple[float, float]:
    """Bytes of memory a block of a table of packs, and CPU seconds to enter a pack."""
    keys = similar_keys(blocks * _MEASURED_PACKS)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    table = PackTable(row_bytes, None, None)
    copies = [
        [OffloadKey(bytes(bytearray(key))) for key in keys[at : at + blocks]]
        for at in range(0, len(keys), blocks)
    ]
    for stamp, some in enumerate(copies):
        table.add([Pack(PackName.of(stamp, "0" * 8, blocks, 9), Index(tuple(some)), 0.0)])
        table.take_changes()
    del copies
    memory = (tracemalloc.get_traced_memory()[0] - before) / len(keys)
    tracemalloc.stop()
    index = Index(tuple(keys[:blocks]))
    packs = [Pack(PackName.of(stamp, "1" * 8, blocks, 9), index, 0.0) for stamp in range(100)]
    begin = time.thread_time()
    PackTable(row_bytes, None, None).add(packs)
    return memory, (time.thread_time() - begin) / len(packs)


def model(arguments: argparse.Namespace) -> dict[str, str]:
    """Each line of the table."""
    row, machines = arguments.block_bytes, arguments.machines
    blocks = most_blocks(row, None)
    packs = arguments.blocks / blocks
    index = len(Index(tuple(similar_keys(blocks))).text())
    memory, enter_s = measure(blocks, row)
    stored = packs / (arguments.days * 86_400)  # packs a second, by all
    full_listing_s = max(LIST_ALL_S, packs / LISTED_A_SECOND)
    puts = stored + machines * 2 / UPKEEP_S + machines / TERM_S
    lists = machines * (1 + packs / _KEYS_A_LISTING / full_listing_s + 1 / UPKEEP_S)
    follow = machines * stored  # the index of each new pack
    loads = arguments.loads * stored * blocks / arguments.neighbours
    gets = follow + loads + machines * machines / UPKEEP_S
    held = arguments.blocks * row
    money = {
        "storage": held / 1e9 * arguments.price_gb,
        "puts and listings": (puts + lists) * _MONTH_S / 1000 * arguments.price_put,
        "gets": gets * _MONTH_S / 1000 * arguments.price_get,
    }
    single = stored * blocks * _MONTH_S / 1000 * arguments.price_put
    recent = stored * (LATE_S + 1) * _LIST_ENTRY_BYTES
    return {
        "packs": f"{packs:,.0f} of {blocks} blocks, {format_size(held)}",
        "PUT a second": f"{puts:.1f} ({stored:.1f} packs; namespace, uses and keeper: the rest)",
        "LIST a second": f"{lists:.1f} ({full_listing_s / 60:.0f} min between two listings of all)",
        "GET a second": f"{gets:.0f} ({follow:.0f} for keys of new packs, {loads:.0f} for loads of "
        f"{arguments.neighbours} neighbours)",
        "bytes an engine follows": f"{format_size(int(stored * index + recent))}/s "
        f"({index:,} bytes of keys a pack, listings of the last {LATE_S + 1:.0f} s)",
        "CPU an engine follows with": f"{stored * enter_s * 1e3:.2f} ms a second",
        "memory of an engine's table": f"{format_size(int(arguments.blocks * memory))} ({memory:.0f} bytes a block)",
        "a start": f"{packs / _KEYS_A_LISTING:,.0f} listings and {packs:,.0f} reads of keys, "
        f"{format_size(int(packs * index))}: {packs / arguments.reads_s:,.0f} s at {arguments.reads_s} a second; after "
        f"{LONGEST_SCAN_S:.0f} s it serves, and goes on",
        "cost a month": f"{sum(money.values()):,.0f} $: "
        + ", ".join(f"{what} {dollars:,.0f}" for what, dollars in money.items()),
        "cost a month of a million blocks": f"{sum(money.values()) / arguments.blocks * 1e6:,.2f} $",
        "one PUT for each block instead": f"{single:,.0f} $ a month for stores alone",
    }


def main() -> None:
    """Parse, compute, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--machines", type=int, default=10)
    add("--blocks", type=int, default=10_000_000)
    add("--block-bytes", type=int, default=128 << 10)
    add("--days", type=float, default=1.0, help="in which as many blocks are stored as the bucket holds")
    add("--loads", type=float, default=5.0, help="blocks loaded for one stored")
    add("--neighbours", type=int, default=16, help="blocks that one read of a pack loads")
    add("--reads-s", type=int, default=1100, help="small reads a second, as measured")
    add("--price-put", type=float, default=0.005, help="$ for 1,000 PUT or LIST")
    add("--price-get", type=float, default=0.0004, help="$ for 1,000 GET")
    add("--price-gb", type=float, default=0.023, help="$ for a GB a month")
    arguments = parser.parse_args()
    print(
        f"| {arguments.machines} machines, {arguments.blocks:,} blocks of {format_size(arguments.block_bytes)} | |"
    )
    print("|---|---|")
    for what, value in model(arguments).items():
        print(f"| {what} | {value} |")


if __name__ == "__main__":
    main()
