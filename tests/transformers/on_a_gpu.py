"""Transformers' engine on a CPU whose KV is taken to be on the simulated GPU: the device and the self-test unchanged.

The model computes on the host at once. So there are two memories: the one it computes in, and the GPU's, which kvtier
copies from and to. What the model writes comes to the GPU's later, as a kernel on the compute stream. Once all of it
is there, the next use reads the GPU's memory. A store that comes too early finds the old bytes; a load that comes too
early is lost.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvtier_core.transfer import KVLayout
from kvtier_transformers import engine
from tests.transfer.kv import said_to_be_on_a_gpu
from tests.transfer.simgpu.gpu import GPU, SimulatedEvent

_LATE_S = 0.01
"""A kernel takes so long at most: several times what a small copy takes."""


@contextmanager
def kv_on_a_gpu(seed: int = 0) -> Iterator[GPU]:
    """Engines that are opened here have their KV there; the thread that opens them is the one that uses them."""
    gpu = GPU(seed)
    memory = _Memory(gpu, seed)

    def make_layout(tensors: Sequence[torch.Tensor]) -> KVLayout:
        return said_to_be_on_a_gpu(KVLayout(memory.take(tensors)))

    with gpu.installed(), patch.object(engine, "KVLayout", make_layout), memory:
        yield gpu
    assert not gpu.faults, gpu.faults


class _Memory(TorchDispatchMode):
    """The GPU's memory beside the host's: sees every operation on either while it is entered."""

    def __init__(self, gpu: GPU, seed: int) -> None:
        super().__init__()
        self._gpu = gpu
        self._random = random.Random(seed)
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The host's and the GPU's, ``(blocks, items)``, by where the host's memory begins."""
        self._written = SimulatedEvent()
        """After the last write: until it is reached, no load that waits for compute has ended."""

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The GPU's memory for these."""
        there = [tensor.clone() for tensor in tensors]
        self._pairs |= {_memory_of(one): (one, other) for one, other in zip(tensors, there, strict=True)}
        return there

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_view = not func._schema.is_mutable and any(value.alias_info for value in func._schema.returns)
        used = {_memory_of(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        pairs = [self._pairs[memory] for memory in used & self._pairs.keys()]
        if is_view or not pairs:
            return func(*args, **kwargs)
        if self._written.query():
            self._read()
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        before = [here.clone() for here, _ in pairs]
        result = func(*args, **kwargs)
        compute = self._gpu.compute
        compute.launch(partial(time.sleep, self._random.uniform(0, _LATE_S)))
        for (here, there), old in zip(pairs, before, strict=True):
            blocks = (here != old).any(dim=1).nonzero()[:, 0]
            compute.launch(partial(there.index_copy_, 0, blocks, here[blocks]))
        self._written.record(compute)
        return result

    def _read(self) -> None:
        """Take over what is in the GPU's memory now."""
        compute, begun = self._gpu.compute, SimulatedEvent(blocking=True)
        for here, there in self._pairs.values():
            compute.launch(partial(here.copy_, there))
        begun.record(compute)
        begun.synchronize()


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
