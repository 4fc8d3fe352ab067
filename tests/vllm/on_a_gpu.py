"""Real vLLM on a CPU whose KV is taken to be on the simulated GPU: the device, the self-test and the worker unchanged.

vLLM computes on the host at once. So there are two memories: vLLM's own, and the GPU's, which kvtier copies from and
to. What a step computes reaches the GPU's memory later, as a kernel on the compute stream. The next step waits for the
stream and reads that memory. A store that comes too early finds the old bytes; a load that comes too early is lost.
"""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar
from unittest.mock import patch

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401 - puts stand-ins in the place of torch.cuda's streams, which must come first
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from kvtier_core import transfer
from kvtier_vllm import spec, worker
from kvtier_vllm.parts import Part
from tests.coordinator.mutate import changed
from tests.transfer.kv import said_to_be_on_a_gpu
from tests.transfer.simgpu.gpu import GPU, SimulatedEvent, SimulatedStream

_Result = TypeVar("_Result")
_LATE_S = 0.01
"""A kernel takes so long at most: several times what a small copy takes."""
_for_good = ExitStack()


def put_kv_on_a_gpu(seed: int, mistake: tuple[str, str, str] | None = None, *, is_tested: bool = True) -> GPU:
    """For the rest of this process. With a *mistake* (see ``changed``): from the start, or once it ``is_tested``."""
    gpu = GPU(seed)
    _for_good.enter_context(gpu.installed())
    memory = _Memory(gpu, seed)

    def make_layout(part, kv_caches):
        return said_to_be_on_a_gpu(real_layout(part, memory.take(kv_caches)))

    def self_test(*arguments):
        report = transfer.self_test(*arguments) if is_tested else None
        if mistake is not None:
            _for_good.enter_context(changed(*mistake))
        return report or transfer.self_test(*arguments)

    def swap_blocks_batch(*arrays):
        gpu.copy_batch(*(array.numpy() for array in arrays))

    def model_forward(runner, *arguments, **options):
        if not isinstance(runner.async_output_copy_stream, SimulatedStream):  # what vLLM has there on a CPU
            runner.async_output_copy_stream = torch.cuda.Stream()
        return memory.compute(partial(real_forward, runner, *arguments, **options))

    def zero_block_ids(runner, block_ids):
        memory.compute(partial(real_zero, runner, block_ids))

    real_layout = Part.make_layout
    real_forward, real_zero = CPUModelRunner._model_forward, CPUModelRunner._zero_block_ids
    patch.multiple(spec, _check_device=lambda _: "cuda", self_test=self_test).start()
    patch.object(Part, "make_layout", make_layout).start()
    patch.object(worker, "swap_blocks_batch", swap_blocks_batch).start()
    patch.multiple(CPUModelRunner, _model_forward=model_forward, _zero_block_ids=zero_block_ids).start()
    return gpu


class _Memory:
    """The GPU's memory beside vLLM's own."""

    def __init__(self, gpu: GPU, seed: int) -> None:
        self._gpu = gpu
        self._random = random.Random(seed)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self, kv_caches: CanonicalKVCaches) -> CanonicalKVCaches:
        """Make the GPU's memory for these."""
        there = [replace(item, tensor=item.tensor.clone()) for item in kv_caches.tensors]
        self._pairs = [(a.tensor, b.tensor) for a, b in zip(kv_caches.tensors, there, strict=True)]
        return replace(kv_caches, tensors=there)

    def compute(self, run: Callable[[], _Result]) -> _Result:
        """Run it on what is in the GPU's memory now, and let what it wrote come there later."""
        assert not self._gpu.faults, self._gpu.faults
        compute, begun = self._gpu.compute, SimulatedEvent(blocking=True)
        for here, there in self._pairs:
            compute.launch(partial(here.copy_, there))
        begun.record(compute)
        begun.synchronize()
        before = [here.clone() for here, _ in self._pairs]
        result = run()
        compute.launch(partial(time.sleep, self._random.uniform(0, _LATE_S)))
        for (here, there), old in zip(self._pairs, before, strict=True):
            blocks = (here != old).any(dim=1).nonzero()[:, 0]
            compute.launch(partial(there.index_copy_, 0, blocks, here[blocks]))
        return result
