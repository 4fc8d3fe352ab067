"""The disk tier's side of the policies benchmark: prompts written once and read later, through the real manager.

The pool is emptied before each prompt is read, so that every block found comes from the disk.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvtier_core import load_settings
from kvtier_core.engine import (
    GroupSpec,
    Namespace,
    TierManager,
    make_offload_key,
    open_manager,
    plan_geometry,
)
from kvtier_core.tier import OffloadKey, RequestInfo
from kvtier_core.transfer import Pool

ROW = 64 << 10
"""Bytes of a block: so large that an index takes little beside it."""
LAYOUTS = ("extents", "files")
_TOKENS = 16
_PATIENCE_S = 60.0


def run_disk(layout: str, rows: int, prompts: Sequence[Sequence[int]], piece: int) -> int:
    """The blocks found on a disk tier with a capacity of *rows* blocks, when *prompts* come in order."""
    with tempfile.TemporaryDirectory(prefix="kvtier-policies-") as root:
        tier = {
            "type": "disk",
            "layout": layout,
            "root": Path(root) / "kv",
            "min_free": 0,
            "capacity": rows * ROW,
        }
        pool = {"capacity": 2 * max(map(len, prompts)) * ROW, "prefault": False, "max_promotion": 0.75}
        settings = load_settings(
            overrides={"pool": pool, "tiers": {"disk": tier}, "on_reset": "pool"}, environ={}
        )
        namespace = Namespace(
            model="prompts",
            kv_dtype="float32",
            tokens_per_block=_TOKENS,
            groups=(GroupSpec(layers=("0",), block_bytes=ROW - 64),),
            layout="benchmark",
            weights_digest="none",
        )
        memory = Pool.create(plan_geometry(settings, namespace))
        manager = open_manager(settings, namespace, memory)
        names = {
            block: make_offload_key(block.to_bytes(32, "big"), 0) for prompt in prompts for block in prompt
        }
        try:
            return sum(
                _serve(manager, f"r{number}", [names[block] for block in prompt], piece)
                for number, prompt in enumerate(prompts)
            )
        finally:
            manager.shutdown(_PATIENCE_S)
            memory.close()


def _serve(manager: TierManager, request: str, keys: Sequence[OffloadKey], piece: int) -> int:
    """Load what the disk has of a prompt, and store the rest."""
    manager.reset_cache()
    manager.new_request(RequestInfo(request_id=request))
    while not (answer := manager.lookup(request, [keys])).is_settled:
        manager.end_step()
        manager.wait(0.1)
    found = answer.ready_tokens // _TOKENS
    if found:
        manager.commit_load(manager.reserve_load(request, keys[:found]).job_id)
    for begin in range(found, len(keys), piece):
        stored = manager.reserve_store(request, keys[begin : begin + piece])
        assert stored is not None, "the pool has room for two prompts"
        if stored.keys:
            manager.commit_store(stored.job_id, success=True)
        manager.end_step()
        while manager.has_pending_work:
            manager.wait(_PATIENCE_S)
    manager.request_finished(request)
    manager.end_step()
    return found
