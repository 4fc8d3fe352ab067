"""The time of a block's last use survives a restart, to a minute, without a write for each load (B2)."""

import os

import pytest

from kvtier_disk.extents import upkeep
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
            tier.hooks.touch(keys=KEYS[:2])
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
            tier.plugin._current._tier.follow()
    with extents.drive(tmp_path, capacity=capacity, refresh="1h") as tier:
        usage = tier.usage()
        for key in similar_keys(1000)[-len(kept) // 2 :]:
            tier.store(extents.rows(key))
        assert usage is not None
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
