"""A program: one of two ranks' linkers, whose cache raises in rank 1. Says what each load came to, as JSON.

Started with the rank, and a file by which the two find each other.
"""

import json
import sys
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from kvtier_sglang.cache import CopyStuckError
from kvtier_sglang.changes import CHANGES
from kvtier_sglang.inspection import Ranks
from kvtier_sglang.linker import KvtierLinker
from kvtier_sglang.pages import page_numbers

PAGE = 4
RAISED = {"mistaken": ValueError("told to raise"), "stuck": CopyStuckError("told to be stuck")}


def main() -> None:
    """Load three requests in this rank."""
    rank, place = int(sys.argv[1]), sys.argv[2]
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    linker = object.__new__(KvtierLinker)
    linker._ranks = Ranks(group=torch.distributed.group.WORLD, rank=rank, size=2)
    linker._changes_seen = CHANGES.count
    part = SimpleNamespace(blocks_of=lambda slots: page_numbers(slots, PAGE))
    linker.__dict__["_parts"] = {PoolName.KV: (0, part)}

    def load(name: str, blocks: object) -> bool:
        if rank == 1 and name in RAISED:
            raise RAISED[name]
        return True

    linker.__dict__["_cache"] = SimpleNamespace(load=load)
    pages = SimpleNamespace(name=PoolName.KV, keys=["00" * 32], device_indices=torch.arange(PAGE, 2 * PAGE))
    said: dict[str, object] = {}
    for name in ("right", "mistaken", "stuck"):
        try:
            said[name] = linker.load(name, [pages])
        except CopyStuckError as error:
            said[name] = str(error)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
