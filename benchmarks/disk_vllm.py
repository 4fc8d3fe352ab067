"""Run by ``disk.py`` in an interpreter that has vLLM: its ``fs`` tier, told over a pipe what to store and load.

``python disk_vllm.py ROOT``: one JSON object a line comes in, one goes out. The manager is vLLM's own, made with the
least of a specification that it asks for; its blocks are rows of page-aligned memory, as ours are.
"""

import json
import mmap
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

_TELL = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever vLLM prints must not end up between the answers


def make_manager(root: Path, rows: memoryview) -> "FileSystemTierManager":
    """The manager of one worker of a plain model."""
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager  # noqa: PLC0415 - after stdout was moved

    config = SimpleNamespace(
        groups=[],
        parallel=SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
        ),
        model=SimpleNamespace(name="bench", dtype="float16"),
        cache=SimpleNamespace(tokens_per_hash=16),
        canonical_layout=False,
        replicated_layout=False,
    )
    specification = SimpleNamespace(
        config=config,
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
    )
    return FileSystemTierManager(specification, rows, "fs", str(root))


def move(manager: "FileSystemTierManager", what: str, keys: list[bytes], per_job: int) -> dict[str, float]:
    """Store or load all rows, and wait."""
    from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: PLC0415

    submit = manager.submit_store if what == "store" else manager.submit_load
    cpu_s, started = time.process_time(), time.perf_counter()
    waiting = 0
    for begin in range(0, len(keys), per_job):
        batch = keys[begin : begin + per_job]
        submit(
            TransferJob(
                job_id=begin,
                keys=batch,
                chunk_ids=np.arange(begin, begin + len(batch)),
                is_promotion=what == "load",
                req_context=None,
            )
        )
        waiting += 1
    manager.drain_jobs()
    seconds, used = time.perf_counter() - started, time.process_time() - cpu_s
    results = list(manager.get_finished_jobs())
    if len(results) != waiting or not all(result.success for result in results):
        raise RuntimeError(f"vLLM's tier failed {what}")
    return {"seconds": seconds, "cpu_s": used}


def main() -> None:
    """Serve until the pipe ends."""
    root = Path(sys.argv[1])
    shape = json.loads(sys.stdin.readline())
    memory = mmap.mmap(-1, shape["count"] * shape["row_bytes"])
    array = np.frombuffer(memory, np.uint8)
    array[:] = np.random.default_rng(0).integers(0, 256, len(array), np.uint8)
    manager = make_manager(root, array.reshape(shape["count"], shape["row_bytes"]).data)
    answer({})
    for line in sys.stdin:
        order = json.loads(line)
        if order["what"] == "clear":
            for directory in root.glob("*_r0"):
                shutil.rmtree(directory)
            answer({})
        else:
            keys = [bytes.fromhex(key) for key in order["keys"]]
            answer(move(manager, order["what"], keys, shape["per_job"]))
    manager.shutdown()


def answer(data: dict[str, float]) -> None:
    """One line back."""
    _TELL.write(json.dumps(data) + "\n")
    _TELL.flush()


if __name__ == "__main__":
    main()
