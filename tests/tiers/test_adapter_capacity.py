"""How the adapter keeps a tier inside its capacity."""

import random

import pytest

from kvtier_core.errors import TierOpenError
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking.bounds import BoundedContents
from kvtier_core.policies import BUILT_IN, LRU, CheckedPolicy
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import BlockInfo, TierContext, TierInfo
from kvtier_testing.rows import similar_keys
from kvtier_testing.tiers import assert_contents
from tests.tiers.held import num_blocks, num_held
from tests.tiers.scripted import ROW, Gate, ScanningTier, Script, drive, fail, row

KEYS = similar_keys(40)
A, B, C, D = KEYS[:4]
PERSISTENT = TierInfo(medium="memory", persistent=True)


def rows(*keys):
    return {key: row(KEYS.index(key)) for key in keys}


def test_c13_the_longest_unused_block_leaves_before_the_new_one_comes():
    script = Script()
    with drive(script, capacity_blocks=3) as tier:
        tier.store(rows(A, B, C))
        tier.load([A])
        tier.touch([B])
        tier.store(rows(D))
        assert_contents(tier, rows(A, B, D), absent=[C])
    assert script.most_blocks == 3
    assert script.calls.index(("delete", (C,))) < script.calls.index(("store", (D,)))


@pytest.mark.parametrize("threads", [1, 4])
def test_c13_use_never_passes_the_capacity_at_any_moment(threads):
    script = Script()
    rng = random.Random(threads)
    with drive(script, capacity_blocks=5, threads=threads) as tier:
        jobs = [tier.start_store(rows(*rng.sample(KEYS, 4))) for _ in range(100)]
        for job in jobs:
            error = tier.wait(job).error
            assert error is None or "full" in error
        assert num_held(tier) == len(script.blocks) == 5
    assert script.most_blocks == 5
    assert not script.violations


class Broken(LRU):
    """Gives out nothing, or falls over in the method that *fault* names."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def evict(self, n, keep):
        self._fall_over("evict")
        return [] if self.fault == "gives none" else super().evict(n, keep)

    def insert(self, entries):
        super().insert(entries)
        self._fall_over("insert")

    def release(self, entries):
        super().release(entries)
        self._fall_over("release")

    def remove(self, entries):
        super().remove(entries)
        self._fall_over("remove")

    def _fall_over(self, method: str) -> None:
        if self.fault == method:
            raise RuntimeError("out of its mind")


@pytest.mark.parametrize("fault", ["gives none", "evict", "insert", "release", "remove"])
def test_c30_a_plugins_eviction_policy_that_is_broken_costs_its_blocks_and_no_io_thread(monkeypatch, fault):
    checked = CheckedPolicy(Broken(fault), "mine", "test-dist 9.9")
    monkeypatch.setitem(BUILT_IN, "mine", lambda _capacity: checked)
    script = Script()
    with drive(script, capacity_blocks=3, threads=1, policy="mine") as tier:
        assert tier.store(rows(A, B, C)).error is None
        assert tier.load([A]).rows == rows(A)
        script.blocks.pop(B)
        assert tier.load([B]).result.missing == (B,)
        assert tier.store(rows(B)).error is None
        error = tier.store(rows(D)).error
        assert error is not None
        assert "eviction policy 'mine' of test-dist 9.9" in error
        assert ("gave 0" if fault == "gives none" else f"raised RuntimeError in {fault} (out of its") in error
        assert tier.load([A, C]).rows == rows(A, C)
    assert not tier.unanswered()


def test_c13_a_block_being_loaded_is_no_victim_and_a_full_tier_says_so():
    script = Script()
    with drive(script, capacity_blocks=2, threads=4) as tier:
        tier.store(rows(A, B))
        script.before = gate = Gate("load")
        into = [bytearray(ROW), bytearray(ROW)]
        loads = [tier.start_load([A], into[:1]), tier.start_load([B], into[1:])]
        gate.wait_entered(2)
        result = tier.store(rows(C))
        assert result.failed == (C,)
        assert result.error is not None
        assert "full" in result.error
        assert [method for method, keys in script.calls if C in keys] == []
        gate.open()
        for load in loads:
            assert tier.wait(load).error is None
        assert into == [rows(A)[A], rows(B)[B]]
        assert_contents(tier, rows(A, B), absent=[C])
        assert tier.store(rows(C)).error is None


def test_c13_a_block_whose_load_waits_is_no_victim():
    script = Script()
    with drive(script, capacity_blocks=2, threads=1) as tier:
        tier.store(rows(B, A))
        script.before = gate = Gate("store")
        storing = tier.start_store(rows(C))  # takes the room of A
        gate.wait_entered()
        (into,) = [bytearray(ROW)]
        waiting = tier.start_load([B], [into])
        next_store = tier.start_store(rows(D))
        gate.open()
        assert tier.wait(waiting).error is None
        assert into == rows(B)[B]
        tier.wait(storing)
        tier.wait(next_store)
        assert num_held(tier) == 2


def test_k3_o2_room_of_removed_blocks_is_used_again():
    script = Script()
    with drive(script, capacity_blocks=10, threads=1) as tier:
        for index in range(50):
            keys = [KEYS[(index * 5 + offset) % 40] for offset in range(5)]
            assert tier.store(rows(*keys)).error is None
            tier.discard(keys)
            assert tier.store({}).error is None
            assert tier.load(keys).rows == {}
        assert tier.store(rows(*KEYS[:10])).error is None
        assert tier.lookup(KEYS) == [True] * 10 + [False] * 30
        assert num_held(tier) == len(script.blocks) == 10
        assert script.count("delete") >= 10


def test_k5_o2_a_failed_store_takes_no_room():
    script = Script()
    with drive(script, capacity_blocks=4) as tier:
        script.before = lambda method, keys: fail(OSError(28, "full")) if method == "store" else None
        for _ in range(10):
            assert set(tier.store(rows(A, B, C)).failed) == {A, B, C}
            assert num_held(tier) == 0
        script.before = lambda method, keys: None
        assert tier.store(rows(A, B, C, D)).error is None
        assert_contents(tier, rows(A, B, C, D))


def test_c30_when_room_cannot_be_made_the_store_fails_and_the_old_blocks_stay():
    script = Script()
    with drive(script, capacity_blocks=2) as tier:
        tier.store(rows(A, B))
        script.before = lambda method, keys: (
            fail(OSError(30, "Read-only file system")) if method == "delete" else None
        )
        result = tier.store(rows(C))
        assert result.failed == (C,)
        assert result.error is not None
        assert "no room could be made" in result.error
        assert "Read-only" in result.error
        assert_contents(tier, rows(A, B), absent=[C])
        assert num_held(tier) == 2
        script.before = lambda method, keys: None
        assert tier.store(rows(C)).error is None
        assert num_held(tier) == 2


def test_c13_a_block_stored_anew_leaves_before_it_comes():
    script = Script()
    with drive(script, capacity_blocks=1, threads=1) as tier:
        tier.store(rows(A))
        script.before = lambda method, keys: fail(OSError("bad sector")) if method == "load" else None
        tier.load([A])
        script.before = lambda method, keys: None
        assert num_held(tier) == 1
        assert tier.store({A: row(9)}).error is None
        assert tier.load([A]).rows == {A: row(9)}
        assert [call for call in script.calls if call[0] in {"store", "delete"}] == [
            ("store", (A,)),
            ("delete", (A,)),
            ("store", (A,)),
        ]


def test_c13_at_the_start_the_oldest_blocks_beyond_the_capacity_leave():
    script = Script()
    script.times = {key: 60.0 * index for index, key in enumerate(KEYS)}
    with drive(script, ScanningTier, info=PERSISTENT, seed=rows(*KEYS), capacity_blocks=7) as tier:
        assert set(script.blocks) == set(KEYS[-7:])
        assert num_held(tier) == 7
        tier.store(rows(A))
        assert_contents(tier, rows(A, *KEYS[-6:]), absent=KEYS[1:-6])


def test_c54_an_unknown_policy_is_refused_before_anything_opens():
    script = Script()
    with pytest.raises(TierOpenError, match="known are"):
        drive(script, policy="fifo2")
    assert script.calls == [("init", ())]


def test_the_default_capacity_of_the_tier_type_holds_where_none_is_set():
    script = Script()
    with drive(script, info=TierInfo(medium="memory", default_capacity=3 * ROW)) as tier:
        tier.store(rows(*KEYS[:10]))
        assert num_held(tier) == len(script.blocks) == 3
        assert script.contexts[0].capacity_bytes == 3 * ROW


# The bookkeeping alone.


def bounds_of(blocks: int, ttl: float | None) -> BoundedContents:
    context = TierContext(name="t", namespace="n", row_bytes=ROW, capacity_bytes=blocks * ROW)
    settings = TierSettings(type="test", ttl=ttl)
    return BoundedContents(TierInfo(medium="test"), settings, context, enumerable=True)


class BoundsWorld:
    """Random calls on ``BoundedContents`` beside a plain set of what the tier would really hold."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.most = self.rng.randint(1, 5)
        self.bounds = bounds_of(self.most, self.rng.choice([None, 20.0]))
        self.really: set[OffloadKey] = set()
        self.arriving: dict[OffloadKey, list[OffloadKey]] = {}  # with victims whose delete has not ended
        self.pins: list[OffloadKey] = []
        self.outcomes: set[str] = set()
        self.now = 0

    def busy(self) -> set[OffloadKey]:
        return {*self.arriving, *(victim for victims in self.arriving.values() for victim in victims)}

    def step(self) -> None:
        self.now += 1
        action = self.rng.choice(
            [self.reserve, self.finish] * 2 + [self.pin, self.unpin, self.remove, self.use]
        )
        action(self.rng.choice(KEYS[:8]))
        if old := self.bounds.expire(self.now):
            self.outcomes.add("expired")
            assert not any(self.bounds.holding(old, self.now))
        assert num_blocks(self.bounds) == len(self.really)
        served = [key for key, held in zip(KEYS, self.bounds.holding(KEYS, self.now), strict=True) if held]
        assert all(self.bounds.presence.contains_many(served))

    def reserve(self, key: OffloadKey) -> None:
        if key in self.busy() or self.bounds.holding([key], self.now) == [True]:
            return
        self.bounds.pin(key)
        victims = self.bounds.reserve(key, self.rng.randrange(3), KEYS.index(key))
        if victims is None:
            self.outcomes.add("full")
            self.bounds.unpin(key)
            return
        self.outcomes.add("itself" if key in victims else f"{len(victims)} victims")
        assert not [victim for victim in victims if victim in self.pins and victim != key]
        self.arriving[key] = victims

    def finish(self, _key: OffloadKey) -> None:
        if not self.arriving:
            return
        key = self.rng.choice(list(self.arriving))
        victims = self.arriving.pop(key)
        if victims and self.rng.random() < 0.2:
            self.bounds.room_made(victims, self.now, deleted=False)
            self.bounds.stored({key: False}, self.now)
        else:
            self.bounds.room_made(victims, self.now, deleted=True)
            self.really.difference_update(victims)
            self.store(key)
        self.bounds.unpin(key)

    def store(self, key: OffloadKey) -> None:
        if self.rng.random() < 0.2:
            self.bounds.stored({key: False}, self.now)
            return
        self.really.add(key)
        assert len(self.really) <= self.most
        self.bounds.stored({key: True}, self.now)
        assert self.bounds.holding([key], self.now) == [True]

    def pin(self, key: OffloadKey) -> None:
        self.bounds.pin(key)
        self.pins.append(key)

    def unpin(self, _key: OffloadKey) -> None:
        if self.pins:
            self.bounds.unpin(self.pins.pop(self.rng.randrange(len(self.pins))))

    def remove(self, key: OffloadKey) -> None:
        if key not in self.busy():
            self.bounds.gone([key])
            self.really.discard(key)

    def use(self, key: OffloadKey) -> None:
        if self.rng.random() < 0.5:
            self.bounds.touch(key, self.rng.randrange(3), KEYS.index(key), self.now)
        else:
            self.bounds.distrust([key])
            assert self.bounds.holding([key], self.now) == [False]

    def rest(self) -> None:
        """End everything under way: nothing may stay pinned."""
        while self.arriving:
            self.finish(A)
        while self.pins:
            self.unpin(A)
        assert self.bounds.reserve(KEYS[-1], 0, 0) is not None


def test_c13_bounds_never_give_away_more_slots_than_there_are():
    """A seeded simulation that has seen each outcome."""
    outcomes: set[str] = set()
    for seed in range(20):
        world = BoundsWorld(seed)
        for _ in range(2000):
            world.step()
        world.rest()
        outcomes |= world.outcomes
    assert outcomes == {"full", "0 victims", "1 victims", "itself", "expired"}


def test_c52_a_time_ahead_of_now_counts_as_now_and_no_block_stays_for_ever():
    bounds = bounds_of(8, ttl=10.0)
    bounds.adopt([BlockInfo(key=KEYS[0], bytes=1, time=1000.0)], now=20.0)
    assert bounds.holding([KEYS[0]], 29.0) == [True]
    assert bounds.holding([KEYS[0]], 31.0) == [False]
    assert bounds.expire(31.0) == [KEYS[0]]


def test_c13_adopting_keeps_the_newest_that_fit_and_are_not_too_old():
    bounds = bounds_of(3, ttl=600.0)
    found = [BlockInfo(key=key, bytes=ROW, time=60.0 * index) for index, key in enumerate(KEYS[:8])]
    surplus = bounds.adopt(random.Random(0).sample(found, 8), now=810.0)
    assert surplus == KEYS[:5]
    assert bounds.presence.contains_many(KEYS[:8]) == [False] * 5 + [True] * 3
    assert num_blocks(bounds) == 8
    assert bounds.holding(KEYS[:8], 810.0) == [False] * 5 + [True] * 3
    bounds.gone(surplus)
    assert num_blocks(bounds) == 3
    assert bounds.expire(930.0) == [KEYS[5]]
    assert bounds.reserve(A, 0, 0) == [KEYS[5]]


def test_c33_surplus_that_cannot_be_deleted_is_not_served_and_leaves_first(caplog):
    script = Script()
    script.times = {A: 60.0, B: 120.0, C: 180.0}
    seed = {key: row(0) for key in (A, B, C)}
    script.before = lambda method, keys: fail(OSError(30, "Read-only")) if method == "delete" else None
    with drive(script, ScanningTier, info=PERSISTENT, seed=seed, capacity_blocks=2) as tier:
        assert "delete: OSError: [Errno 30] Read-only; 1 blocks that are too old or beyond" in caplog.text
        assert tier.lookup([A, B, C]) == [False, True, True]
        assert num_held(tier) == 3
        script.before = lambda method, keys: None
        assert tier.store(rows(D)).error is None
        assert_contents(tier, {C: row(0), **rows(D)}, absent=[A, B])
        assert num_held(tier) == len(script.blocks) == 2
