"""A shutdown that a tier did not confirm may be called again. A tier that has rows in its hands confirms none (C34)."""

import threading
import time
from functools import partial

import pytest

from kvtier_core.blocktier import BlockTier
from kvtier_core.hookspecs import hookimpl
from kvtier_core.manager.blocking import BlockingTier
from kvtier_core.manager.hook_tier import HookTier
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import JobResult, TierInfo
from tests.manager.conftest import PATIENCE_S, key


def stored_and_evicted(bench, *numbers):
    bench.new("a")
    bench.store("a", *numbers)
    bench.settle()
    bench.evict_all()


def start_load(bench, number):
    """Begin a load of a block, and do not wait for it."""
    bench.new("b")
    bench.until(lambda: not bench.manager.lookup("b", [[key(number)]]).is_settled and _is_loading(bench))


def _is_loading(bench):
    bench.manager.end_step()
    return bench.manager.coordinator.state.tiers["one"].loading_rows == 1


def test_c34_a_tier_whose_shutdown_raised_is_asked_again_by_the_next_one(make_bench, caplog):
    bench = make_bench()
    tier = bench.tiers["one"]
    tier.raise_in["shutdown"] = OSError("not now")
    begin = time.monotonic()
    assert not bench.manager.shutdown(PATIENCE_S)
    assert time.monotonic() < begin + PATIENCE_S / 2, "it waited for a tier that had answered"
    assert "has not returned" not in caplog.text
    tier.raise_in.clear()
    assert bench.manager.shutdown(PATIENCE_S)
    assert [hook for hook, _ in tier.calls].count("shutdown") == 2


def test_c34_a_shutdown_that_still_runs_is_not_called_a_second_time(make_bench):
    bench = make_bench()
    tier = bench.tiers["one"]
    gate = tier.hang_in["shutdown"] = threading.Event()
    for _ in range(2):
        assert not bench.manager.shutdown(0.1)
    gate.set()
    assert bench.manager.shutdown(PATIENCE_S)
    assert [hook for hook, _ in tier.calls].count("shutdown") == 1


class Once(dict):
    """What is read from it is gone."""

    def __getitem__(self, name):
        return self.pop(name)


class Gates(list):
    """Each ``wait`` is for the next one."""

    def wait(self):
        self.pop(0).wait()

    def set(self):
        for gate in self:
            gate.set()


def test_c34_a_shutdown_waits_for_its_own_end_and_not_for_that_of_the_one_before(make_bench):
    bench = make_bench()
    tier = bench.tiers["one"]
    first, second = threading.Event(), threading.Event()
    tier.hang_in["shutdown"] = Gates([first, second])
    tier.raise_in = Once(shutdown=OSError("not now"))
    assert not bench.manager.shutdown(0.1)
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(bench.manager.shutdown(PATIENCE_S)))
    waiter.start()
    asked = bench.manager._tiers.ports["one"]._shutdowns
    while asked.empty():
        waiter.join(0.01)
    first.set()
    assert tier.wait_for_call("shutdown", PATIENCE_S, times=2)
    waiter.join(0.2)
    second.set()
    waiter.join(PATIENCE_S)
    assert answers == [True]


class Gated(BlockTier):
    """Loads wait for ``gate``."""

    info = TierInfo(medium="memory")
    gate = threading.Event()
    loading = threading.Event()

    def open(self):
        self.blocks = {}

    def contains(self, keys):
        return [key in self.blocks for key in keys]

    def store(self, key, block):
        self.blocks[key] = bytes(block)

    def load(self, key, into):
        self.loading.set()
        self.gate.wait()
        into[:] = self.blocks[key]
        return True

    def delete(self, keys):
        raise AssertionError("nothing has to be deleted")

    def close(self):
        pass


@pytest.fixture
def gated():
    Gated.gate.clear()
    Gated.loading.clear()
    yield Gated
    Gated.gate.set()


def test_c34_a_blocking_tier_is_down_once_its_last_call_has_returned(make_bench, gated):
    bench = make_bench(make_port=partial(BlockingTier, gated, TierSettings(type="gated")))
    stored_and_evicted(bench, 1)
    start_load(bench, 1)
    assert gated.loading.wait(PATIENCE_S)
    assert not bench.manager.shutdown(0.1)
    gated.gate.set()
    assert bench.manager.shutdown(PATIENCE_S)


def test_c34_jobs_that_a_tier_dropped_at_its_shutdown_do_not_keep_the_pool_mapped(make_bench):
    bench = make_bench()
    tier = bench.tiers["one"]
    tier.hold.add("store")
    bench.new("a")
    bench.store("a", 1)
    bench.until(lambda: bool(tier.held))
    tier.held.clear()
    assert bench.manager.shutdown(PATIENCE_S)
    assert bench.pool.close()


class FourHooks:
    """The hooks that are required, and no other; results of loads wait for ``gate``."""

    def __init__(self, context):
        self.blocks = {}
        self.results = []
        self.gate = threading.Event()

    @hookimpl
    def lookup(self, job):
        return [key in self.blocks for key in job.keys]

    @hookimpl
    def submit_store(self, job):
        self.blocks.update((key, bytes(row)) for key, row in zip(job.keys, job.buffers, strict=True))
        self.results.append(JobResult(job_id=job.id))

    @hookimpl
    def submit_load(self, job):
        threading.Thread(target=self._load, args=(job,), daemon=True).start()

    def _load(self, job):
        self.gate.wait()
        self.results.append(JobResult(job_id=job.id))

    @hookimpl
    def get_finished_jobs(self):
        results, self.results = self.results, []
        return results


def test_c34_a_tier_without_a_shutdown_is_down_once_it_has_answered_its_loads(make_bench):
    tiers = []

    def build(context):
        tiers.append(FourHooks(context))
        return tiers[0]

    bench = make_bench(make_port=partial(HookTier, build))
    stored_and_evicted(bench, 1)
    start_load(bench, 1)
    assert not bench.manager.shutdown(0.2), "it may still write into the row"
    tiers[0].gate.set()
    assert bench.manager.shutdown(PATIENCE_S)
