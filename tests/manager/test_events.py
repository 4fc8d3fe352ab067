"""Events replay into the exact contents of the pool and of each tier that this process alone changes (C16)."""

import random

import pytest

from kvtier_core import load_settings
from kvtier_core.engine import open_manager, plan_geometry
from kvtier_core.ledger import BlockState
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_core.tier import RequestInfo, TierInfo
from kvtier_core.transfer import Pool
from tests.manager.conftest import PATIENCE_S, PAYLOAD, content, key


class Replay:
    """What somebody knows who has nothing but the events."""

    def __init__(self, manager):
        self.manager = manager
        self.contents = {}

    def catch_up(self):
        for place, event in self.manager.take_events():
            held = self.contents.setdefault(place, set())
            if event.kind == "cleared":
                held.clear()
            elif event.kind == "stored":
                held.update(event.keys)
            else:
                assert held.issuperset(event.keys)
                held.difference_update(event.keys)
        return self.contents


def in_pool(manager):
    return {block.key for block in manager.coordinator.state.ledger.blocks if block.state is BlockState.READY}


@pytest.mark.parametrize("seed", range(3))
def test_c16_events_replay_into_the_pool(make_bench, seed):
    bench = make_bench(num_rows=8)
    choice = random.Random(seed)
    bench.new("a")
    bench.store("a", 900)  # before anybody asks
    replay = Replay(bench.manager)
    for step in range(200):
        bench.store("a", *(choice.randrange(40) for _ in range(choice.randint(1, 3))))
        if choice.random() < 0.3:
            bench.load("a", *choice.sample(range(40), 2))
        if step == 120:
            bench.manager.reset_cache()
        bench.settle()
        if choice.random() < 0.5:
            assert replay.catch_up().get("pool", set()) == in_pool(bench.manager)
    assert replay.catch_up()["pool"] == in_pool(bench.manager)
    assert set(replay.contents) == {"pool"}, "a tier that does not report its contents has no events"


def test_c16_a_failed_device_store_gives_no_event(make_bench):
    bench = make_bench()
    bench.manager.take_events()
    bench.new("a")
    prepared = bench.manager.reserve_store("a", [key(1)])
    bench.manager.commit_store(prepared.job_id, success=False)
    assert bench.manager.take_events() == []


@pytest.fixture
def memory_manager():
    settings = load_settings(
        overrides={
            "pool": {"capacity": 16 * 4096},
            "tiers": {"small": {"type": "memory", "capacity": 4 * 4096}},
            "lookup_order": ["small"],
        },
        environ={},
    )
    namespace = Namespace(
        model="test",
        kv_dtype="float32",
        tokens_per_block=16,
        groups=(GroupSpec(layers=("0",), block_bytes=PAYLOAD),),
        layout="test",
        weights_digest="w",
    )
    with Pool.create(plan_geometry(settings, namespace)) as pool:
        manager = open_manager(settings, namespace, pool)
        yield manager, pool
        assert manager.shutdown(PATIENCE_S)


def test_c16_events_replay_into_a_bounded_tier_over_a_reset(memory_manager):
    manager, pool = memory_manager
    replay = Replay(manager)

    def store(*numbers):
        manager.new_request(RequestInfo(request_id=f"{numbers}"))
        prepared = manager.reserve_store(f"{numbers}", [key(n) for n in numbers])
        for number, row in zip(numbers, prepared.rows, strict=True):
            pool.row(row)[:PAYLOAD] = content(number)
        manager.commit_store(prepared.job_id, success=True)
        manager.request_finished(f"{numbers}")

    def expect(*numbers):
        for _ in range(1000):
            manager.end_step()
            if replay.catch_up().get("small") == {key(n) for n in numbers}:
                return
            manager.wait(0.05)
        raise AssertionError(replay.contents)

    expect()
    store(1, 2, 3)
    expect(1, 2, 3)
    for number in range(4, 10):
        store(number)
        while manager.has_pending_work:
            manager.wait(PATIENCE_S)
    expect(6, 7, 8, 9)
    manager.reset_cache()
    expect()
    assert replay.contents["pool"] == set()


def test_c16_what_a_tier_on_the_hook_specs_reports_is_told_as_events(make_bench):
    bench = make_bench(info=TierInfo(medium="memory", reports_contents=True), num_rows=8)
    replay = Replay(bench.manager)
    bench.new("a")
    bench.store("a", 1, 2)
    bench.settle()
    assert replay.catch_up()["one"] == {key(1), key(2)}
    report = bench.tiers["one"].context
    report.report_stored([key(2), key(3)])
    report.report_evicted([key(1), key(9)])
    assert replay.catch_up()["one"] == {key(2), key(3)}
    bench.manager.reset_cache()
    bench.until(lambda: replay.catch_up()["one"] == set())
    bench.new("b")
    bench.store("b", 4)
    bench.settle()
    bench.until(lambda: replay.catch_up()["one"] == {key(4)})
