"""A simulated GPU for the CUDA device: streams, events and pinning, over memory that is the host's.

A stream is a thread. It runs what was queued on it in order, each piece after a random pause, so that a host or another
stream that reads too early finds old bytes. What writes to a tensor is queued while ``torch.cuda.stream`` is entered.
What only makes or views tensors is done at once, as on a GPU.

A copy is never over when its call returns unless the call says that it waits. CUDA promises more for memory that is not
pinned; the device may not rest on it.
"""

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier_core.transfer import cuda
from kvtier_core.transfer.plan import Numbers
from tests.transfer.conftest import TIMEOUT_S

_PACES_S = (0.0, 0.0002, 0.001)
"""The longest pause of a stream: one of these, so that any stream may be the slow one."""


class SimulatedStream:
    """``torch.cuda.Stream``: a thread that carries out what is launched, later."""

    def __init__(self, seed: float, faults: list[str]) -> None:
        self._random = random.Random(seed)
        self._pace_s = self._random.choice(_PACES_S)
        self._faults = faults
        self._kernels: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._launched = self._done = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def launch(self, kernel: Callable[[], object]) -> None:
        self._launched += 1
        self._kernels.put(kernel)

    @property
    def is_idle(self) -> bool:
        """Whether all that was launched is done. Only for the thread that launches."""
        return self._done == self._launched

    def wait_event(self, event: "SimulatedEvent") -> None:
        self.launch(event.newest_record())

    def wait_stream(self, other: "SimulatedStream") -> None:
        event = SimulatedEvent()
        event.record(other)
        self.wait_event(event)

    def finish(self) -> None:
        self._kernels.put(None)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "a stream did not come to its end"

    def _run(self) -> None:
        with torch.inference_mode():
            while (kernel := self._kernels.get()) is not None:
                if self._random.random() < 0.3:
                    time.sleep(self._random.uniform(0, self._pace_s))
                try:
                    kernel()
                except Exception as error:  # noqa: BLE001 - a GPU reports it later as well
                    self._faults.append(f"a kernel failed: {error}")
                self._done += 1
                del kernel  # and the memory that it holds


class SimulatedEvent:
    """``torch.cuda.Event``: a wait is for the newest record at the time of the call, if there is any."""

    gpu: "GPU"
    """The one that is installed."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self._has_timing = enable_timing
        self.blocking = blocking
        self._reached = threading.Event()
        self._reached.set()
        self._reached_at: float | None = None

    def record(self, stream: SimulatedStream | None = None) -> None:
        self._reached = threading.Event()
        self._reached_at = None
        (stream or self.gpu.current_stream()).launch(partial(self._reach, self._reached))

    def _reach(self, reached: threading.Event) -> None:
        self._reached_at = time.perf_counter()
        reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def newest_record(self) -> Callable[[], None]:
        """Waits until the stream has come to it."""
        return partial(_wait_for, self._reached)

    def synchronize(self) -> None:
        """As CUDA it takes a whole processor, unless the event was made to block."""
        while not self.blocking and not self.query():
            pass
        self.newest_record()()

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        """In milliseconds. As CUDA it refuses events that are not recorded, not reached, or made without timing."""
        has_timing = self._has_timing and end._has_timing
        if not has_timing or self._reached_at is None or end._reached_at is None:
            raise RuntimeError("these events have no time between them")
        return (end._reached_at - self._reached_at) * 1e3


def _wait_for(reached: threading.Event) -> None:
    assert reached.wait(TIMEOUT_S), "an event was never reached"


class _Queueing(TorchDispatchMode):
    """Queues on a stream whatever writes to a tensor."""

    def __init__(self, stream: SimulatedStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        if not schema.is_mutable:
            makes = not any(isinstance(value, torch.Tensor) for value in args)
            views = any(value.alias_info is not None for value in schema.returns)
            assert makes or views, f"the simulated GPU can not tell when to run {func}"
            return func(*args, **kwargs)
        self._stream.launch(partial(func, *args, **kwargs))
        if func is torch.ops.aten.copy_.default and not (args[2:] == (True,) or kwargs.get("non_blocking")):
            event = SimulatedEvent(blocking=True)
            event.record(self._stream)
            event.synchronize()
        return kwargs.get("out", args[0])


class GPU:
    """Stands in for ``torch.cuda`` while ``installed``. The engine's kernels are launched on ``compute``."""

    def __init__(self, seed: int, kind: str = "cuda") -> None:
        """*kind*: the module of torch's that it stands in for."""
        self._module = getattr(torch, kind)
        self.faults: list[str] = []
        self._random = random.Random(seed)
        self._current = threading.local()
        self.compute = SimulatedStream(self._random.random(), self.faults)
        self._streams: list[SimulatedStream] = []
        self.pins = True
        """Whether there is room to lock memory in."""
        self._registered: dict[int, int] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """At the end every stream has run all that was queued."""

        def is_pinned(tensor: torch.Tensor) -> bool:
            at = tensor.data_ptr()
            return any(address <= at < address + size for address, size in self._registered.items())

        names = ("Stream", "current_stream", "stream", "device", "set_device", "cudart", "_sleep")
        own = {name: getattr(self, name) for name in names if hasattr(self._module, name)}
        try:
            with (
                patch.multiple(self._module, Event=SimulatedEvent, **own),
                patch.object(SimulatedEvent, "gpu", self, create=True),
                patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
                patch.object(cuda, "find_driver_batch", lambda: None),
                patch.object(torch.Tensor, "is_pinned", is_pinned),
            ):
                yield
        finally:
            for stream in (*self._streams, self.compute):
                stream.finish()

    def Stream(self, device: torch.device | None = None) -> SimulatedStream:  # noqa: N802 - torch's name
        self._streams.append(SimulatedStream(self._random.random(), self.faults))
        return self._streams[-1]

    def current_stream(self, device: torch.device | None = None) -> SimulatedStream:
        return getattr(self._current, "stream", self.compute)

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            with _Queueing(stream):
                yield
        finally:
            self._current.stream = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    def _sleep(self, cycles: int) -> None:
        self.current_stream().launch(partial(time.sleep, cycles / 2e9))

    def copy_batch(self, sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
        """A driver's call for many copies: each runs later. The arrays are read now, as a driver does."""
        stream = self.current_stream()
        assert stream is not self.compute, "a batch may not be queued on the default stream"
        assert len(sizes), "a driver refuses a batch of none"
        for array in (sources, targets, sizes):
            assert array.flags.c_contiguous, "a driver reads one number after the other"
            assert array.dtype == np.int64
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            stream.launch(partial(ctypes.memmove, target, source, size))

    @property
    def is_copying(self) -> bool:
        """Whether anything but what is computed is under way."""
        return not all(stream.is_idle for stream in self._streams)

    def hold_copies(self, gate: threading.Event) -> None:
        """Let nothing but what is computed go on before the *gate* is open."""
        for stream in self._streams:
            stream.launch(partial(_wait_for, gate))

    def set_device(self, device: torch.device) -> None:
        return

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, address: int, size: int, flags: int) -> int:
        if self.pins:
            self._registered[address] = size
        return 0 if self.pins else 2

    def _unregister(self, address: int) -> int:
        del self._registered[address]
        return 0
