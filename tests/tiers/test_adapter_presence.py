"""What the adapter says a tier holds, and from where it knows."""

import random
import sys
import threading
import timeit
from collections.abc import Sequence

import pytest

from kvtier_core.keys import OffloadKey
from kvtier_core.manager.presence import PresenceSet
from kvtier_core.values import TierInfo
from kvtier_testing.driving import PATIENCE_S, TierDriver
from kvtier_testing.rows import similar_keys
from kvtier_testing.tiers import assert_contents
from tests.tiers.held import num_held
from tests.tiers.scripted import (
    ROW,
    BatchTier,
    Clock,
    Gate,
    ScanningTier,
    Script,
    ScriptedTier,
    drive,
    fail,
    row,
)

KEYS = similar_keys(20)
A, B, C, D = KEYS[:4]
PERSISTENT = TierInfo(medium="memory", persistent=True)
ASKED = TierInfo(medium="memory", persistent=True, bounded_by="tier")
SHARED = TierInfo(medium="memory", persistent=True, shared=True, bounded_by="tier")


def rows(*keys):
    return {key: row(KEYS.index(key)) for key in keys}


def settle(tier: TierDriver) -> None:
    """Wait until the deletes queued so far are done: a store of any key comes after them on one thread."""
    tier.store({similar_keys(1, seed=99)[0]: row(0)})


def test_c10_a_scanned_tier_answers_lookups_at_once_and_is_not_asked():
    script = Script()
    with drive(script, ScanningTier, info=PERSISTENT, seed=rows(A, B)) as tier:
        presence = tier.resident()
        assert presence is not None
        assert presence.contains_many([A]) == [True]
        assert presence.contains_many([A, C, B]) == [True, False, True]
        assert tier.lookup([A, C, B]) == [True, False, True]
        tier.store(rows(C))
        assert presence.contains_many([C]) == [True]
        assert script.count("contains") == 0
        assert script.count("scan") == 1


def test_c10_a_tier_that_starts_empty_needs_no_scan():
    script = Script()
    with drive(script) as tier:
        tier.store(rows(A))
        assert tier.lookup([A, B]) == [True, False]
        assert script.count("contains") == 0


@pytest.mark.parametrize("info", [ASKED, SHARED])
def test_c21_a_tier_whose_contents_are_not_known_is_asked_in_an_io_thread(info):
    script = Script()
    with drive(script, ScanningTier if info is SHARED else ScriptedTier, info=info, seed=rows(A)) as tier:
        assert tier.resident() is None
        tier.store(rows(B))
        assert tier.lookup([A, B, C]) == [True, True, False]
        assert script.count("contains") >= 1
        assert script.count("scan") == 0
        assert_contents(tier, rows(A, B), absent=[C, D])


def test_k7_o2_what_others_store_in_a_shared_tier_is_seen_at_the_next_lookup():
    script = Script()
    with drive(script, info=SHARED) as tier:
        assert tier.lookup([A]) == [False]
        assert tier.load([A]).result.missing == (A,)
        script.blocks.update(rows(A))
        assert tier.lookup([A]) == [True]
        assert tier.load([A]).rows == rows(A)


def test_k5_o3_a_shared_tier_that_fails_for_a_while_is_asked_again():
    script = Script()
    errors = iter([PermissionError("the token has expired")] * 3)

    def before(method, keys):
        if method in {"load", "contains"} and (error := next(errors, None)) is not None:
            raise error

    with drive(script, info=SHARED, seed=rows(A)) as tier:
        script.before = before
        for _ in range(2):
            assert tier.load([A]).result.failed == (A,)
        assert tier.wait(tier.start_lookup([A])).failed == (A,)
        assert tier.lookup([A]) == [True]
        assert tier.load([A]).rows == rows(A)
        assert script.count("delete") == 0


def test_c10_past_the_limit_of_resident_keys_the_tier_is_asked():
    script = Script()
    with drive(script, limits={"max_resident_keys": 3}, capacity_blocks=10) as tier:
        tier.store(rows(A, B, C))
        assert tier.resident() is not None
        tier.store(rows(D))
        assert tier.resident() is None
        assert tier.lookup(KEYS[:5]) == [True] * 4 + [False]
        assert script.count("contains") >= 1
        stores = script.count("store")
        assert tier.store(rows(A, B, C, D)).error is None
        assert script.count("store") == stores
        assert num_held(tier) == 4


def test_k6_o1_a_key_that_could_not_be_loaded_is_not_asked_for_again_until_it_is_stored():
    script = Script()
    with drive(script) as tier:
        tier.store(rows(A, B))
        script.before = lambda method, keys: (
            fail(OSError("broken")) if method == "load" and A in keys else None
        )
        assert tier.load([A, B]).result.failed == (A,)
        assert tier.lookup([A, B]) == [False, True]
        for _ in range(100):
            assert tier.load([A]).result.missing == (A,)
        assert sum(keys == (A,) for method, keys in script.calls if method == "load") == 1
        script.before = lambda method, keys: None
        assert tier.store(rows(A)).error is None
        assert_contents(tier, rows(A, B))


def test_c23_a_key_found_absent_is_forgotten_until_it_is_stored():
    script = Script()
    with drive(script) as tier:
        tier.store(rows(A, B))
        del script.blocks[A]
        assert tier.load([A, B]).result.missing == (A,)
        assert tier.lookup([A, B]) == [False, True]
        assert num_held(tier) == 1
        tier.store(rows(A))
        assert_contents(tier, rows(A, B))


def test_c52_a_tier_that_bounds_itself_reports_what_it_dropped():
    script = Script()
    with drive(script, info=TierInfo(medium="memory", bounded_by="tier")) as tier:
        tier.store(rows(A, B))
        del script.blocks[A]
        script.contexts[-1].report_evicted([A, D])
        assert tier.lookup([A, B]) == [False, True]


def test_c52_a_block_that_the_tier_drops_before_its_store_has_ended_is_not_taken_to_be_there():
    script = Script()
    info = TierInfo(medium="memory", bounded_by="tier")

    def drop(method: str, keys: Sequence[OffloadKey]) -> list[bool] | None:
        if method != "store_many":
            return None
        script.blocks[B] = rows(B)[B]
        script.contexts[-1].report_evicted([A])  # for another one's sake
        return [True] * len(keys)

    with drive(script, BatchTier, info=info) as tier:
        script.before = drop
        assert tier.store(rows(A, B)).error is None
        assert tier.lookup([A, B]) == [False, True]
        script.before = lambda _method, _keys: None
        assert tier.store(rows(A)).error is None
        assert_contents(tier, rows(A, B))


def test_c03_discarded_blocks_are_gone_at_once_and_then_from_the_tier():
    script = Script()
    with drive(script, threads=1) as tier:
        tier.store(rows(A, B, C))
        script.before = gate = Gate("delete")
        tier.discard([A, B, A])
        assert tier.lookup([A, B, C]) == [False, False, True]
        assert tier.unanswered() == set()
        gate.open()
        settle(tier)
        assert set(script.blocks) == {C, similar_keys(1, seed=99)[0]}
        assert num_held(tier) == 2


def test_c03_discarded_blocks_that_cannot_be_deleted_stay_unserved(caplog):
    script = Script()
    with drive(script, threads=1) as tier:
        tier.store(rows(A, B))
        script.before = lambda method, keys: fail(OSError("broken")) if method == "delete" else None
        tier.discard([A])
        settle(tier)
        assert tier.lookup([A, B]) == [False, True]
        assert tier.load([A]).result.missing == (A,)
        assert "1 blocks stay, but are not served" in caplog.text
        tier.discard([B])
        settle(tier)
        assert caplog.text.count("stay, but are not served") == 1, (
            "B20: the same fault again tells nothing new"
        )
        tier.store({B: row(78)})
        script.before = lambda method, keys: None
        tier.store({A: row(77)})
        assert tier.load([A]).rows == {A: row(77)}


# Time to live.


def test_c52_blocks_past_their_time_to_live_are_absent_and_deleted():
    script, clock = Script(), Clock()
    with drive(script, wall=clock, ttl="60s", threads=1) as tier:
        tier.store(rows(A))
        clock.now += 30
        tier.store(rows(B))
        clock.now += 30
        assert tier.load([A, B]).result.missing == (A,)
        assert tier.lookup([A, B]) == [False, True]
        settle(tier)
        assert A not in script.blocks
        assert tier.store(rows(A)).error is None
        clock.now += 59
        assert tier.lookup([A, B]) == [True, False]


def test_c52_an_expired_block_is_stored_anew_and_not_deleted():
    script, clock = Script(), Clock()
    with drive(script, wall=clock, ttl="60s", threads=1) as tier:
        tier.store(rows(A))
        script.before = gate = Gate("store", keys=[B])
        busy = tier.start_store(rows(B))
        gate.wait_entered()
        clock.now += 61
        tier.collect()
        again = tier.start_store({A: row(55)})
        gate.open()
        assert tier.wait(again).error is None
        tier.wait(busy)
        settle(tier)
        assert tier.load([A]).rows == {A: row(55)}


def test_c52_age_counts_over_a_restart():
    script, clock = Script(), Clock()
    script.times = {A: clock.now - 61, B: clock.now - 10}
    with drive(script, ScanningTier, info=PERSISTENT, seed=rows(A, B), wall=clock, ttl="60s") as tier:
        assert set(script.blocks) == {B}
        assert_contents(tier, rows(B), absent=[A])


# Events.


def replay(contents: set[bytes], tier: TierDriver) -> set[bytes]:
    for event in tier.take_events():
        if event.kind == "cleared":
            contents.clear()
        elif event.kind == "stored":
            assert contents.isdisjoint(event.keys)
            contents.update(event.keys)
        else:
            assert contents.issuperset(event.keys)
            contents.difference_update(event.keys)
    return contents


def test_c16_the_first_events_are_the_whole_contents():
    with drive(Script(), ScanningTier, info=PERSISTENT, seed=rows(A, B)) as tier:
        tier.store(rows(C))
        first, second = tier.take_events()
        assert (first.kind, second.kind) == ("cleared", "stored")
        assert set(second.keys) == {A, B, C}
        assert tier.take_events() == []
        tier.reset("other")
        assert [event.kind for event in tier.take_events()] == ["cleared", "stored"]


def test_c16_more_changes_than_the_limit_give_the_whole_contents(monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.changes.MAX_CHANGES", 3)
    with drive(Script()) as tier:
        contents = replay(set(), tier)
        tier.store(rows(A, B, C))
        assert replay(contents, tier) == {A, B, C}
        tier.store(rows(*KEYS[3:10]))
        assert [event.kind for event in tier.take_events()] == ["cleared", "stored"]


@pytest.mark.parametrize("seed", range(5))
def test_c16_k14_o3_events_replay_into_the_contents_whatever_happens(seed):
    rng = random.Random(seed)
    script = Script()
    with drive(script, capacity_blocks=6, threads=2) as tier:
        contents: set[bytes] = set()
        failing: set[str] = set()
        script.before = lambda method, keys: fail(OSError("broken")) if method in failing else None
        for _ in range(100):
            failing.clear()
            failing.update(rng.sample(["store", "load", "delete"], rng.choice([0, 0, 0, 1])))
            keys = rng.sample(KEYS, rng.randint(1, 4))
            action = rng.random()
            if action < 0.6:
                tier.store(rows(*keys))
            elif action < 0.8:
                tier.load(keys)
            else:
                tier.discard(keys)
            replay(contents, tier)
            assert contents == {key for key, there in zip(KEYS, tier.lookup(KEYS), strict=True) if there}


# The set itself.


def test_c10_presence_is_bounded_and_says_when_it_is_incomplete():
    presence = PresenceSet(2, complete=True)
    complete = []
    for keys in ([A, B], [A, B], [C]):
        presence.add(keys)
        complete.append(presence.complete)
    assert complete == [True, True, False]
    assert presence.contains_many([A, B, C]) == [True, True, False]
    presence.discard([A, D])
    assert presence.contains_many([A, B, C]) == [False, True, False]
    presence.add([C])
    assert presence.contains_many([C]) == [True]
    assert not presence.complete  # what was refused once may still be in the tier


def test_c10_presence_may_be_read_while_it_changes():
    presence = PresenceSet(1000, complete=True)
    presence.add([A])
    stop = threading.Event()
    seen: set[tuple[bool, ...]] = set()

    def read() -> None:
        while not stop.is_set():
            seen.add(tuple(presence.contains_many([A, B, C])))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    readers = [threading.Thread(target=read) for _ in range(3)]
    try:
        for reader in readers:
            reader.start()
        for _ in range(2000):
            presence.add([B, C])
            presence.discard([C, B])
    finally:
        stop.set()
        for reader in readers:
            reader.join(PATIENCE_S)
        sys.setswitchinterval(interval)
    assert seen <= {(True, False, False), (True, True, True)}  # always one state of the set
    assert seen


def test_k11_o2_reading_presence_costs_under_a_microsecond_a_key():
    presence = PresenceSet(100_000, complete=True)
    keys = similar_keys(2000)
    presence.add(keys)
    best = min(timeit.repeat(lambda: presence.contains_many(keys), number=5, repeat=20)) / 5 / len(keys)
    assert best < 1e-6


def test_c52_buffers_of_a_row_are_as_large_as_the_row():
    with drive(Script()) as tier:
        tier.store(rows(A))
        assert len(tier.load([A]).rows[A]) == ROW
