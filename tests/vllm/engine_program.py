"""A program: one vLLM engine that takes commands, one JSON object a line, and answers each with one line.

It runs apart from the tests because vLLM sets up its process for good (signal handlers, threads, torch.distributed).
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[2]))  # this program runs apart from the tests


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM prints; the answers must stay clean
    options = json.loads(sys.stdin.readline())
    engine = Engine(options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(engine, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)
    engine.close()


def refusal(llm, options):
    """What was said to *options*, which can't be served, and what of kvtier's is still there afterwards."""
    try:
        llm(**options)
    except Exception as error:  # noqa: BLE001 - whatever vLLM makes of it
        said = str(error)
    else:
        raise AssertionError(f"{options} were not refused")
    return {
        "said": said,
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier")],
        "files": [name for name in open_files() if "kvtier" in name or "vllm_offload" in name],
        "shared": [
            name for name in os.listdir("/dev/shm") if options["kv_transfer_config"]["engine_id"] in name
        ],
    }


def open_files():
    """What this process has open or mapped, by name."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{descriptor}")
    for line in Path("/proc/self/maps").read_text().splitlines():
        yield " ".join(line.split()[5:])


def _adapter(name, number, path, *, in_place=False):
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, path, load_inplace=in_place)


def _envelope(hints):
    """Hints as vLLM takes them, from ``[[type, version, payload], ...]``."""
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    if hints is None:
        return None
    return KvHintsEnvelope("0.1", "m1", [KvHintAction(str(i), *hint) for i, hint in enumerate(hints)])


def _said(output):
    """The tokens of each completion, and where asked for how likely each token was."""
    completions = sorted(output.outputs, key=lambda completion: completion.index)
    said = {"tokens": [list(completion.token_ids) for completion in completions]}
    if completions[0].logprobs is not None:
        said["logprobs"] = [
            [
                among[token].logprob
                for token, among in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
            for completion in completions
        ]
    return said


class Engine:
    def __init__(self, options):
        from vllm import LLM

        from tests.vllm import on_a_cpu

        if simulated_gpu := options.pop("simulated_gpu", None):
            from tests.vllm.on_a_gpu import put_kv_on_a_gpu

            self.gpu = put_kv_on_a_gpu(**simulated_gpu)
        if options.pop("asynchronous", False):
            on_a_cpu.schedule_asynchronously(has_streams=simulated_gpu is not None)
        if not options.pop("learns_cost", False) and options["kv_transfer_config"]:
            on_a_cpu.forget_costs()
        if options.pop("prefix_caching_of_mla", False):
            on_a_cpu.cache_prefixes_of_mla()
        self.refusals = [refusal(LLM, {**options, **changes}) for changes in options.pop("refused_first", ())]
        self.options = options
        self.llm = LLM(**options)
        if options.get("pipeline_parallel_size", 1) > 1:
            self.llm.collective_rpc(on_a_cpu.complete_stage)
        self.core = self.llm.llm_engine.engine_core
        self.soaks = 0
        self.resets: Counter[str] = Counter()
        """Done in the middle of a soak, by kind."""

    def generate(self, prompts, max_tokens=8, params=None, salt=None, adapter=None):
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts],
            sampling,
            use_tqdm=False,
            lora_request=None if adapter is None else _adapter(**adapter),
        )
        return [{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in outputs]

    def soak(self, requests, at_once, aborts, resets):
        """Serve *requests* (as ``_add`` takes them), *at_once* at a time; what each said, ``None`` of those aborted.

        *aborts* maps a request's number to the steps after which it is aborted. *resets* come one after another, each
        once ``after`` requests are done and ``later`` steps have passed, and with ``idle`` once nothing runs any more.
        """
        engine = self.llm.llm_engine
        said: dict[int, dict] = {}
        age: dict[int, int] = {}
        waiting, resets, since = list(enumerate(requests)), list(resets), 0
        while waiting or age:
            is_due = bool(resets) and len(said) >= resets[0]["after"]
            while waiting and len(age) < at_once and not (is_due and resets[0].get("idle")):
                number, request = waiting.pop(0)
                self._add(number, **request)
                age[number] = 0
            for output in engine.step():
                if output.finished:
                    number = int(output.request_id.partition("/")[0])
                    said[number] = _said(output)
                    age.pop(number, None)
            for number in list(age):
                age[number] += 1
                if age[number] == aborts.get(str(number)):
                    engine.abort_request([f"{number}/{self.soaks}"])
                    del age[number]
            since += is_due
            is_due = is_due and since > resets[0].get("later", 0) and not (age and resets[0].get("idle"))
            if is_due and self._reset_as(resets[0], is_idle=not age):
                resets.pop(0)
                since = 0
        self.soaks += 1
        return [None if str(number) in aborts else said[number] for number in range(len(requests))]

    def _add(self, number, prompt, max_tokens, salt=None, hints=None, priority=0, **sampling):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **{"temperature": 0, **sampling},
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        salted = {"cache_salt": salt} if salt else {}
        request_id = f"{number}/{self.soaks}"
        self.llm.llm_engine.add_request(
            request_id,
            {"prompt_token_ids": prompt, **salted},
            params,
            priority=priority,
            kv_hints=_envelope(hints),
        )

    def prefetched(self, first, second, hints):
        """How many blocks came from tiers while *first* ran and *second*, with *hints*, waited for its turn."""
        engine, tiers = self.llm.llm_engine, self.manager._tiers.counters.tiers.values()
        before = sum(tier.loaded for tier in tiers)
        self._add(0, first, 64)
        self._add(1, second, 1, hints=hints)
        came = None
        while engine.has_unfinished_requests():
            if any(output.finished for output in engine.step()) and came is None:
                came = sum(tier.loaded for tier in tiers) - before
        self.soaks += 1
        return came

    def _reset_as(self, kind, *, is_idle):
        running, connector = kind.get("running", True), kind.get("connector", True)
        try:
            self.reset(connector=connector, running=running)
        except RuntimeError:  # vLLM can't reset while a request waits for its load
            return False
        name = f"running={running} connector={connector} {'idle' if is_idle else 'busy'}"
        self.resets[name] += 1
        return True

    def reset(self, *, connector=False, running=False):
        return self.llm.llm_engine.reset_prefix_cache(
            reset_running_requests=running, reset_connector=connector
        )

    def rpc(self, method):
        """What a client may have vLLM's workers do."""
        self.llm.collective_rpc(method)

    def sleep(self, level):
        self.llm.sleep(level=level)
        self.llm.wake_up()

    def leave_memory(self, prompt, how):
        """Whether copies of a *prompt*'s KV run when a reset or a sleep begins, and whether when the memory may go.

        They can't end before it has begun: the simulated GPU holds them for another half second.
        """
        from vllm.v1.worker.cpu_worker import CPUWorker

        runs, gate = [], threading.Event()
        self.gpu.hold_copies(gate)
        self.generate([prompt])
        self.generate([[1, 2, 3]])  # vLLM stores in the steps after
        runs.append(self.gpu.is_copying)
        threading.Timer(0.5, gate.set).start()
        if how == "reset":
            assert self.reset(connector=True)
            runs.append(self.gpu.is_copying)
        else:
            with patch.object(CPUWorker, "sleep", lambda *_, **__: runs.append(self.gpu.is_copying)):
                self.sleep(level=1)
        return runs

    def worker_pids(self):
        return self.llm.collective_rpc(lambda worker: os.getpid())

    def load_adapter(self, **adapter):
        self.core.engine_core.add_lora(lora_request=_adapter(**adapter))

    def rpc_adapter(self, **adapter):
        """The same behind the engine core's back."""
        self.llm.collective_rpc("add_lora", args=(_adapter(**adapter),))

    def unload_adapter(self, number):
        self.llm.llm_engine.remove_lora(number)

    def metrics(self):
        found = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                labels = {k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")}
                name = metric.name + ("" if not labels else json.dumps(labels, sort_keys=True))
                found[name] = metric.value
        return found

    def metrics_of_each(self):
        """One engine's, as of a server that has several."""
        return [self.metrics()]

    # -- for benchmarks

    def timed(self, prompt):
        """Seconds and CPU seconds to the first token of one prompt, and how much of it was cached."""
        begun, cpu = time.perf_counter(), time.process_time()
        (output,) = self.generate([prompt], max_tokens=1)
        return {
            "seconds": time.perf_counter() - begun,
            "cpu": time.process_time() - cpu,
            "cached": output["cached"],
        }

    def stored(self):
        """Let what was computed be stored, all the way; the CPU seconds that took, few of them for looking."""
        cpu = time.process_time()
        self.generate([[1, 2, 3]], max_tokens=2)
        scheduler = self.core.engine_core.scheduler
        while scheduler.has_requests():
            self.llm.llm_engine.step()
            time.sleep(0.01)
        manager = getattr(getattr(scheduler.connector, "connector_scheduler", None), "manager", None)
        if hasattr(manager, "_tiers"):
            self.settle()
        else:
            while getattr(manager, "_jobs", None):
                time.sleep(0.05)
                self.generate([[1, 2, 3]], max_tokens=2)
        return {"cpu": time.process_time() - cpu}

    def throughput(self, prompts, at_once):
        """Seconds for all prompts, some at a time, one token each."""
        requests = [{"prompt": prompt, "max_tokens": 1} for prompt in prompts]
        begun = time.perf_counter()
        self.soak(requests, at_once, {}, [])
        return {"seconds": time.perf_counter() - begun}

    # -- what only an engine in this process can show

    @property
    def manager(self):
        return self.core.engine_core.scheduler.connector.connector_scheduler.manager

    def refused_starts(self):
        return self.refusals

    def start_another(self):
        """Start a second engine in this process; what is said to that."""
        return refusal(type(self.llm), self.options)

    def is_asynchronous(self):
        return self.core.engine_core.batch_queue is not None

    def hashes_in_pool(self):
        """The last 64 bits of the block hashes of what can be loaded from the pool, as vLLM's events have them."""
        blocks = self.manager._tiers.coordinator.state.ledger.blocks
        return [str(int.from_bytes(block.key[24:32])) for block in blocks if block.state.value == "ready"]

    def layers_in_pool(self):
        """Of each block that can be loaded from the pool, what stands for the bytes of each layer."""
        from kvtier_core.engine import get_offload_group_idx

        pool, found = self.manager._pool, {}
        groups = {group["group_id"]: group for group in json.loads(pool.note)["groups"]}
        for block in self.manager._tiers.coordinator.state.ledger.blocks:
            if block.state.value == "ready":
                group = groups[get_offload_group_idx(block.key)]
                size = sum(group["parts"]) // len(group["layers"])
                found[block.key.hex()] = {
                    layer: sha256(pool.row(block.row)[index * size : (index + 1) * size]).hexdigest()
                    for index, layer in enumerate(group["layers"])
                }
        return found

    def figures(self):
        """The counters of kvtier."""
        return self.manager._tiers.figures()

    def settle_bridge(self):
        """As ``settle``, of kvtier behind vLLM's own tiering."""
        return self.settle(tiers=self.manager.secondary_tiers[0]._tiers)

    def settle(self, timeout=60.0, tiers=None):
        """Step until vLLM and the tiers have nothing to do; then what the books say."""
        deadline = time.monotonic() + timeout
        while self.core.engine_core.scheduler.has_requests() and time.monotonic() < deadline:
            self.llm.llm_engine.step()
        tiers = tiers or self.manager._tiers
        while tiers.has_pending_work and time.monotonic() < deadline:
            tiers.wait(1.0)
            tiers.end_step()
        return self.books(tiers)

    def books(self, tiers=None):
        tiers = tiers or self.manager._tiers
        state = tiers.coordinator.state
        from tests.sim.books import check_books

        check_books(state)
        blocks = list(state.ledger.blocks)
        return {
            "pins": sum(block.pins for block in blocks),
            "leases": len(state.ledger.leases),
            "detached": state.ledger.num_detached,
            "jobs": len(state.jobs),
            "requests": len(state.requests),
            "resets": dict(self.resets),
            "blocks": len(blocks),
            "hits": dict(tiers.counters.hits),
            "misses": {reason.value: n for reason, n in tiers.counters.misses.items()},
            "integrity": {name: tier.integrity for name, tier in tiers.counters.tiers.items()},
            "stored": {name: tier.stored for name, tier in tiers.counters.tiers.items()},
            "load_failed": {name: tier.load_failed for name, tier in tiers.counters.tiers.items()},
            "store_failed": {name: tier.store_failed for name, tier in tiers.counters.tiers.items()},
            "timeouts": {name: tier.timeouts for name, tier in tiers.counters.tiers.items()},
        }

    def close(self):
        self.core.shutdown()


if __name__ == "__main__":
    main()
