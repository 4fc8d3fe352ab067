"""Blocks go device -> pool -> tier and back, with proofs on the way (C03, C20, C21, C24, C29, C34)."""

import pytest

from kvtier_core.errors import ClosedError, TierOpenError


def test_c20_a_stored_block_reaches_every_tier_and_comes_back_from_the_first(make_bench):
    bench = make_bench(["one", "two"])
    bench.new("a")
    bench.store("a", 1, 2, 3)
    bench.settle()
    bench.evict_all()
    assert bench.load("a", 1, 2, 3) == [True, True, True]
    assert bench.manager.counters.hits == {"one": 3}
    assert bench.manager.counters.tiers["two"].stored == 3


def test_c03_rows_carry_a_proof_when_a_tier_sees_them(make_bench):
    bench = make_bench()
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    [stored] = bench.tiers["one"].blocks[bench.manager.namespace.name].values()
    assert stored[-64:-60] == b"kvt\x01"


def test_c03_corrupt_bytes_are_a_miss_counted_and_the_rest_of_the_job_is_kept(make_bench):
    bench = make_bench()
    bench.new("a")
    bench.store("a", 1, 2, 3)
    bench.settle()
    blocks = bench.tiers["one"].blocks[bench.manager.namespace.name]
    third = sorted(blocks)[2]
    blocks[third] = blocks[third][:100] + bytes([blocks[third][100] ^ 1]) + blocks[third][101:]
    bench.evict_all()
    assert bench.load("a", 1, 2, 3) == [True, True]
    assert bench.manager.counters.tiers["one"].integrity == 1
    # And it is not asked of that tier again.
    assert bench.load("a", 1, 2, 3) == [True, True]
    assert bench.manager.counters.tiers["one"].integrity == 1


def test_c03_swapped_blocks_are_a_miss(make_bench):
    bench = make_bench(max_quarantined=1.0)
    bench.new("a")
    bench.store("a", 1, 2)
    bench.settle()
    blocks = bench.tiers["one"].blocks[bench.manager.namespace.name]
    first, second = sorted(blocks)
    blocks[first], blocks[second] = blocks[second], blocks[first]
    bench.evict_all()
    assert bench.load("a", 1, 2) == []
    assert bench.manager.counters.tiers["one"].integrity == 2


def test_k7_o4_after_a_reset_every_tier_misses_and_a_store_in_flight_does_not_surface(make_bench):
    bench = make_bench(["one", "two"])
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    tier = bench.tiers["one"]
    tier.hold.add("store")
    bench.store("a", 2)
    bench.until(lambda: bool(tier.held))
    bench.manager.reset_cache()
    bench.until(lambda: all(t["serving"] for t in bench.manager.figures()["tiers"].values()))
    tier.hold.clear()
    tier.release()
    bench.settle()
    assert bench.lookup("a", 1) == 0
    assert bench.lookup("a", 2) == 0
    bench.manager.request_begins("a")
    bench.store("a", 1, 2)
    bench.settle()
    bench.evict_all()
    assert bench.load("a", 1, 2) == [True, True]


def test_c34_reset_and_shutdown_twice(make_bench):
    bench = make_bench()
    bench.manager.reset_cache()
    bench.manager.reset_cache()
    bench.until(lambda: bench.manager.figures()["tiers"]["one"]["serving"])
    assert bench.manager.shutdown(10)
    assert bench.manager.shutdown(10)
    with pytest.raises(ClosedError):
        bench.new("late")


def test_a_tier_that_cannot_open_is_named_with_its_package(make_bench):
    def prepare(tier):
        tier.raise_in["on_open"] = TierOpenError("the cupboard is locked; unlock it")

    with pytest.raises(
        TierOpenError, match=r"tier 'one' \(type 'faulty' of test-dist 9.9\).*cupboard is locked"
    ):
        make_bench(prepare=prepare)


def test_c26_hooks_of_a_request_come_in_order_also_when_it_finishes_with_a_store_in_flight(make_bench):
    bench = make_bench()
    tier = bench.tiers["one"]
    bench.new("a")
    prepared = bench.manager.reserve_store("a", [b"\0" * 36])
    bench.manager.request_finished("a")
    bench.manager.commit_store(prepared.job_id, success=True)
    assert tier.wait_for_call("on_request_finished")
    mine = [hook for hook, request in tier.calls if request == "a"]
    assert mine == ["on_new_request", "submit_store", "on_request_finished"]


def test_c24_results_are_taken_in_before_a_store_decides_what_to_evict(make_bench):
    bench = make_bench(num_rows=1)
    tier = bench.tiers["one"]
    tier.hold.add("store")
    bench.new("a")
    bench.store("a", 1)  # its cascade pins the only row
    bench.until(lambda: bool(tier.held))
    tier.release()
    bench.wait_for_event()
    assert bench.manager.reserve_store("a", [b"\1" * 36]) is not None


def test_c24_results_are_taken_in_at_most_once_a_step(make_bench):
    bench = make_bench()
    tier = bench.tiers["one"]
    tier.hold.add("store")
    bench.new("a")
    bench.store("a", 1)
    bench.until(lambda: bool(tier.held))
    counters = bench.manager.counters.tiers["one"]
    bench.manager.end_step()
    bench.manager.lookup("a", [[b"\1" * 36]])  # the step's one look
    tier.release()
    bench.wait_for_event()
    bench.manager.lookup("a", [[b"\1" * 36]])
    bench.manager.reserve_store("a", [b"\2" * 36])
    assert counters.stored == 0
    bench.manager.end_step()
    bench.manager.lookup("a", [[b"\1" * 36]])
    assert counters.stored == 1


def test_c29_a_tier_reads_what_it_stores_and_writes_what_it_loads(make_bench):
    bench = make_bench()
    tier = bench.tiers["one"]
    bench.new("a")
    tier.hold = {"store", "load"}
    bench.store("a", 1)
    bench.until(lambda: bool(tier.held))
    assert [buffer.readonly for buffer in tier.held[0][1].buffers] == [True]
    tier.release()
    bench.settle()
    bench.evict_all()
    bench.manager.lookup("a", [[tier.blocks[tier.namespace].copy().popitem()[0]]])
    bench.until(lambda: bool(tier.held))
    assert [buffer.readonly for buffer in tier.held[0][1].buffers] == [False]
    tier.release()
    bench.settle()


def test_v7_a_burst_reaches_the_tier_whole_once_the_engine_is_idle(make_bench):
    bench = make_bench(num_rows=16, max_cascade=0.25)
    bench.new("r")
    bench.store("r", *range(1, 13))
    bench.manager.request_finished("r")
    bench.settle()
    counters = bench.manager.counters.tiers["one"]
    assert (counters.stored, counters.made_up) == (12, 8)
    assert not bench.manager.is_catching_up
    bench.evict_all()
    bench.new("s")
    assert bench.load("s", *range(1, 9)) == [True] * 8
