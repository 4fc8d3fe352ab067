"""When the worker waits for the device. Needs vLLM's types, and no engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier_core.transfer import Direction
from tests.vllm.engines import needs_vllm
from tests.vllm.facts_of import GROUP

pytestmark = needs_vllm


class _Device:
    def __init__(self):
        self.waited_for = []

    def submit(self, direction, job_id, parts):
        """Takes it, and never ends."""

    def wait(self, direction, job_ids, timeout_s):
        self.waited_for.append((direction, job_ids))
        return False

    def get_finished(self):
        return []


@pytest.fixture
def make():
    """Make a worker on a device of the given type that has submitted a store and a load; the worker and its device."""
    from kvtier_vllm.parts import Part
    from kvtier_vllm.worker import KvtierWorker, PoolRows

    control = SimpleNamespace(get_last_announced=lambda _rank, _direction: 0)
    pool: Any = SimpleNamespace(control=control)

    def one(device_type):
        device: Any = _Device()
        worker = KvtierWorker(device, pool, Part([GROUP], 1, 0), 1.0, device_type)
        blocks = SimpleNamespace(block_ids=np.array([3]), group_sizes=[1], block_indices=[0])
        rows = PoolRows([5])
        assert worker.submit_store(7, blocks, rows)
        assert worker.submit_load(8, rows, blocks)
        return worker, device

    return one


@pytest.mark.parametrize(
    ("device_type", "between_s", "waited_for"),
    [("cpu", 0.001, [(Direction.LOAD, [1])]), ("cpu", 0.01, []), ("cuda", 0.001, [])],
)
def test_a_worker_on_a_cpu_that_is_only_asked_waits_a_moment_for_the_load(
    make, monkeypatch, device_type, between_s, waited_for
):
    now = 100.0
    monkeypatch.setattr("kvtier_vllm.worker.time", SimpleNamespace(monotonic=lambda: now))
    worker, device = make(device_type)
    assert worker.get_finished() == []
    assert device.waited_for == []
    now += between_s
    assert worker.get_finished() == []
    assert device.waited_for == waited_for


def test_c42_a_gpus_copies_go_to_vllms_own_call(monkeypatch):
    from kvtier_vllm import worker

    seen = []
    monkeypatch.setattr(worker, "swap_blocks_batch", lambda *arrays: seen.append(arrays))
    worker.copy_batch(np.array([1, 2]), np.array([3, 4]), np.array([5, 6]))
    (arrays,) = seen
    assert [array.tolist() for array in arrays] == [[1, 2], [3, 4], [5, 6]]
    assert {str(array.dtype) for array in arrays} == {"torch.int64"}
