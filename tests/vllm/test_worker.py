"""The worker hands its transfers to the device with what they must follow (C40). Needs vLLM's types, and no engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtier_core.transfer import Direction
from tests.vllm.engines import needs_vllm

pytestmark = needs_vllm


class _Event:
    """Stands in for an accelerator's event, which needs an accelerator."""

    made: list["_Event"]

    def __init__(self, device, *, blocking=False):
        assert blocking, "the waiting thread would spin beside the compute"
        self.device = device
        self.is_recorded = False
        self.made.append(self)

    def record(self):
        self.is_recorded = True

    def synchronize(self):
        """Would wait."""


class _Device:
    def __init__(self):
        self.asked = []

    def submit_store(self, job_id, parts, epoch, compute_done=None):
        self.asked.append((Direction.STORE, compute_done))

    def submit_load(self, job_id, parts, epoch, compute_done=None, *, by_layer=False):
        self.asked.append((Direction.LOAD, compute_done))


@pytest.fixture
def submit(monkeypatch):
    """Submit a store and a load with the KV on a device of the given type; what the device was told to follow."""
    from kvtier_vllm.worker import KvtierWorker, PoolRows

    monkeypatch.setattr(_Event, "made", [], raising=False)
    monkeypatch.setattr(torch, "Event", _Event)
    control = SimpleNamespace(epoch=0, get_last_started=lambda _rank, _direction: 0)
    pool: Any = SimpleNamespace(control=control)

    def both(device_type):
        device: Any = _Device()
        worker = KvtierWorker(device, pool, 0, 1, 1.0, device_type)
        blocks = SimpleNamespace(block_ids=np.array([3]), group_sizes=[1], block_indices=[0])
        rows = PoolRows([5])
        assert worker.submit_store(7, blocks, rows)
        assert worker.submit_load(8, rows, blocks)
        return device.asked

    return both


def test_c40_stores_and_loads_follow_what_vllm_has_launched_and_the_wait_sleeps(submit):
    asked = submit("cuda")
    assert [direction for direction, _ in asked] == [Direction.STORE, Direction.LOAD]
    assert [wait for _, wait in asked] == [event.synchronize for event in _Event.made]
    assert [(event.device, event.is_recorded) for event in _Event.made] == [("cuda", True)] * 2


def test_c40_compute_on_a_cpu_is_over_when_a_transfer_is_submitted(submit):
    assert submit("cpu") == [(Direction.STORE, None), (Direction.LOAD, None)]
