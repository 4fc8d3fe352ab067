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
        self.waited_for = []

    def submit_store(self, job_id, parts, epoch, compute_done=None):
        self.asked.append((Direction.STORE, compute_done))

    def submit_load(self, job_id, parts, epoch, compute_done=None, *, by_layer=False):
        self.asked.append((Direction.LOAD, compute_done))

    def wait(self, direction, job_ids, timeout_s):
        self.waited_for.append((direction, job_ids))
        return False

    def get_finished(self):
        return []


@pytest.fixture
def make(monkeypatch):
    """Make a worker on a device of the given type that has submitted a store and a load; the worker and its device."""
    from kvtier_vllm.worker import KvtierWorker, PoolRows

    monkeypatch.setattr(_Event, "made", [], raising=False)
    monkeypatch.setattr(torch, "Event", _Event)
    control = SimpleNamespace(epoch=0, get_last_started=lambda _rank, _direction: 0)
    pool: Any = SimpleNamespace(control=control)

    def one(device_type):
        device: Any = _Device()
        worker = KvtierWorker(device, pool, 0, 1, 1.0, device_type)
        blocks = SimpleNamespace(block_ids=np.array([3]), group_sizes=[1], block_indices=[0])
        rows = PoolRows([5])
        assert worker.submit_store(7, blocks, rows)
        assert worker.submit_load(8, rows, blocks)
        return worker, device

    return one


def test_c40_stores_and_loads_follow_what_vllm_has_launched_and_the_wait_sleeps(make):
    _, device = make("cuda")
    assert [direction for direction, _ in device.asked] == [Direction.STORE, Direction.LOAD]
    assert [wait for _, wait in device.asked] == [event.synchronize for event in _Event.made]
    assert [(event.device, event.is_recorded) for event in _Event.made] == [("cuda", True)] * 2


def test_c40_compute_on_a_cpu_is_over_when_a_transfer_is_submitted(make):
    _, device = make("cpu")
    assert device.asked == [(Direction.STORE, None), (Direction.LOAD, None)]


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
