"""The time of a block's last use survives a restart, to a minute, without a write for each load (B2).

And with it the order within a prompt: its end leaves before its beginning, however long its blocks took to come (R3).
"""

import os
import shutil
import time
from dataclasses import replace
from itertools import takewhile

import pytest

from kvtier_core.tier import RequestInfo
from kvtier_disk.extents import upkeep
from kvtier_testing.driving import TierDriver
from kvtier_testing.rows import similar_keys
from tests.tiers import disk, extents

KEYS = similar_keys(40)
MINUTE = 60.0


class Clock:
    def __init__(self):
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def stored_at(root, tier, clock, key):
    """Store one block of ten in files, at the clock's time."""
    tier.store(disk.rows(key))
    os.utime(disk.block_file(root, key), (clock.now, clock.now))
    clock.now += MINUTE


def drive_files(root, clock, blocks=10):
    return disk.drive(root, capacity_blocks=blocks, wall=clock)


@pytest.mark.parametrize("use", ["load", "touch"])
def test_b2_files_used_last_stay_after_a_restart(tmp_path, clock, use):
    with drive_files(tmp_path, clock) as tier:
        for key in KEYS[:10]:
            stored_at(tmp_path, tier, clock, key)
        if use == "load":
            tier.load(KEYS[:2])
        else:
            tier.touch(KEYS[:2])
        tier.lookup([KEYS[0]])  # the mark is made before anybody looks again
        extents.wait_until(
            lambda: all(disk.block_file(tmp_path, key).stat().st_atime >= clock.now for key in KEYS[:2]),
            "the uses are noted",
        )
    with drive_files(tmp_path, clock) as tier:
        tier.store(disk.rows(*KEYS[10:18]))
        assert tier.lookup(KEYS[:10]) == [True] * 2 + [False] * 8


def test_b2_a_files_age_is_that_of_its_store_however_often_it_is_used(tmp_path, clock):
    with drive_files(tmp_path, clock) as tier:
        stored_at(tmp_path, tier, clock, KEYS[0])
        stored = disk.block_file(tmp_path, KEYS[0]).stat().st_mtime
        for _ in range(3):
            clock.now += 2 * MINUTE
            tier.load([KEYS[0]])
    assert disk.block_file(tmp_path, KEYS[0]).stat().st_mtime == stored


def test_b2_a_use_is_noted_once_a_minute_at_most(tmp_path, clock, monkeypatch):
    noted: list[object] = []
    utime = os.utime
    with drive_files(tmp_path, clock) as tier:
        stored_at(tmp_path, tier, clock, KEYS[0])
        monkeypatch.setattr(
            os, "utime", lambda *arguments, **options: noted.append(utime(*arguments, **options))
        )
        for _ in range(12):
            clock.now += 10.0
            tier.load([KEYS[0]])
    assert 1 <= len(noted) <= 3


@pytest.mark.parametrize("ended", ["closed", "a minute ago"])
def test_b2_extents_used_last_stay_after_a_restart(tmp_path, clock, monkeypatch, ended):
    monkeypatch.setattr("time.time", clock)
    if ended != "closed":
        monkeypatch.setattr(upkeep.Upkeep, "end", upkeep.Upkeep.end_former)  # as after a kill
    capacity = 4 << 20
    with extents.drive(tmp_path, capacity=capacity, refresh="1h") as tier:
        kept = _fill(tier, clock)
        tier.load(kept[:2])
        clock.now += 2 * MINUTE
        if ended != "closed":
            tier.backend.port._current._tier.follow()
    with extents.drive(tmp_path, capacity=capacity, refresh="1h") as tier:
        for key in similar_keys(1000)[-len(kept) // 2 :]:
            tier.store(extents.rows(key))
        there = tier.lookup(kept)
        assert there[:2] == [True, True]
        assert not all(there)


def _fill(tier, clock):
    """Store blocks until the tier has to let one go; the rest, the longest unused first."""
    stored = []
    for key in similar_keys(1000):
        tier.store(extents.rows(key))
        stored.append(key)
        clock.now += MINUTE
        if not all(tier.lookup(stored)):
            return [key for key, there in zip(stored, tier.lookup(stored), strict=True) if there]
    raise AssertionError("it took everything")


def test_b2_after_a_restart_the_end_of_a_prompt_still_leaves_first(tmp_path, clock):
    with drive_files(tmp_path, clock) as tier:
        for number, key in enumerate(KEYS[:8]):
            tier.store(disk.rows(key))
            os.utime(disk.block_file(tmp_path, key), (clock.now + number / 8, clock.now + number / 8))
    clock.now += 5 * MINUTE
    with drive_files(tmp_path, clock) as tier:
        tier.store(disk.rows(*KEYS[10:14]))
        assert tier.lookup(KEYS[:8]) == [True] * 6 + [False] * 2


class Spread:
    """Prompts whose blocks come one by one, at the clock's times; a restart between them. Of one disk layout."""

    def __init__(self, root, clock, monkeypatch):
        self.root, self.clock = root, clock
        monkeypatch.setattr("time.time", clock)
        monkeypatch.setattr("time.time_ns", lambda: int(clock() * 1e9))
        monkeypatch.setattr("kvtier_core.values._last_chain", 0)
        self.begin()
        make = TierDriver._job
        monkeypatch.setattr(
            TierDriver, "_job", lambda *arguments: replace(make(*arguments), request=self.request)
        )

    def open(self):
        raise NotImplementedError

    def put(self, tier, key):
        raise NotImplementedError

    def begin(self):
        self.request = RequestInfo(request_id="spread")

    def store(self, tier, keys, seconds):
        """Store the blocks of one request, the last one *seconds* after the first."""
        self.begin()
        for key in keys:
            self.put(tier, key)
            self.clock.now += seconds / (len(keys) - 1)

    def left(self, keys):
        """How many of the blocks, from the first on, are still there, with how many of the others."""
        with self.open() as tier:
            there = tier.lookup(keys)
        return len([*takewhile(bool, there)]), sum(there)


class SpreadFiles(Spread):
    room = 200

    def open(self):
        return drive_files(self.root, self.clock, self.room)

    def put(self, tier, key):
        """What the kernel noted as the time of the store is the clock's; what the tier noted stays."""
        before = TIME()
        tier.store(disk.rows(key))
        file = disk.block_file(self.root, key)
        noted = file.stat().st_atime
        os.utime(file, (self.clock.now if noted >= before - 1 else noted, self.clock.now))


class SpreadExtents(Spread):
    capacity = 16 << 20

    def __init__(self, root, clock, monkeypatch):
        super().__init__(root, clock, monkeypatch)
        with self.open() as tier:
            self.store(tier, MANY[:300], MINUTE)
            self.room = sum(tier.lookup(MANY[:300]))
        assert 100 < self.room < 300
        shutil.rmtree(root)
        clock.now += MINUTE

    def open(self):
        return extents.drive(self.root, capacity=self.capacity, refresh="1h")

    def put(self, tier, key):
        tier.store(extents.rows(key))


TIME = time.time
MANY = similar_keys(600)


@pytest.fixture(params=[SpreadFiles, SpreadExtents])
def spread(request, tmp_path, clock, monkeypatch):
    clock.now -= clock.now % MINUTE - 30.0  # in the middle of a minute
    return request.param(tmp_path / "root", clock, monkeypatch)


@pytest.mark.parametrize("seconds", [1, 70, 600])
def test_r3_b2_after_a_restart_the_head_stays_however_long_the_prompt_took(spread, seconds):
    room = spread.room
    first, second = MANY[: room // 2], MANY[300 : 300 + room * 6 // 10]
    with spread.open() as tier:
        spread.store(tier, first, seconds)
    with spread.open() as tier:
        spread.store(tier, second, 1)
    head, there = spread.left(first)
    assert head == there
    assert 0.7 * len(first) <= head < len(first)


@pytest.mark.parametrize("use", ["load", "touch"])
def test_r3_b2_after_a_restart_a_shared_head_stays_with_what_a_later_request_added(spread, use):
    room = spread.room
    shared, other = MANY[: room // 4], MANY[100 : 100 + room // 4]
    own, more = MANY[200 : 200 + room // 4], MANY[300 : 300 + room * 6 // 10]
    with spread.open() as tier:
        spread.store(tier, shared, 70)
        spread.store(tier, other, 1)
        spread.clock.now += MINUTE
        spread.begin()
        if use == "load":
            tier.load(shared)
        else:
            tier.touch(shared, spread.request.chain)
        for key in own:  # the same request, over another edge
            spread.put(tier, key)
            spread.clock.now += 90 / len(own)
        settle_marks(spread, tier, shared)
    with spread.open() as tier:
        spread.store(tier, more, 1)
    head, there = spread.left([*shared, *own])
    assert head == there
    assert head > len(shared)


def settle_marks(spread, tier, keys):
    """Wait for what a tier in files notes after a use."""
    if isinstance(spread, SpreadFiles):
        extents.wait_until(
            lambda: all(
                disk.block_file(spread.root, key).stat().st_atime >= spread.request.chain / 1e6
                for key in keys
            ),
            "the uses are noted",
        )


def test_r3_b2_reading_a_file_leaves_its_time_of_use_alone(tmp_path):
    tier = disk.direct(tmp_path)
    tier.open()
    tier.store(KEYS[0], memoryview(disk.rows(KEYS[0])[KEYS[0]]))
    tier.mark_used({KEYS[0]: 1_000_000.0})
    assert tier.load(KEYS[0], memoryview(bytearray(disk.ROW)))
    assert disk.block_file(tmp_path, KEYS[0]).stat().st_atime == 1_000_000.0
    tier.close()
