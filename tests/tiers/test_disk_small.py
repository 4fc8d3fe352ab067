"""Few blocks take little room, and a small file system is used as it comes (C13)."""

import os

from kvtier_disk.extents.bounds import Bounds, min_free_of, shape_for
from tests.tiers.extents import KEYS, MIB, ROW, direct, extent_files, load, rows, store, used_bytes
from tests.tiers.small_disk import run_on

TERABYTE = 1 << 40
BOUNDS = Bounds(capacity=None, min_free=None, extent_bytes=64 * MIB, ttl=None)


def next_mib(held: int, *, disk_bytes: int = TERABYTE, capacity: int | None = None) -> int:
    """MiB of the next extent of a namespace that holds so many MiB, rounded up: it ends with its last whole row."""
    bounds = Bounds(capacity=capacity, min_free=None, extent_bytes=64 * MIB, ttl=None)
    shape = shape_for(ROW, bounds, 256 << 10, held=held * MIB, disk_bytes=disk_bytes)
    return -(-shape.file_bytes // MIB)


def test_extents_begin_small_and_double_what_there_is():
    assert [next_mib(held) for held in (0, 1, 4, 8, 16, 32, 64, 1000)] == [4, 4, 4, 8, 16, 32, 64, 64]


def test_no_extent_is_more_than_an_eighth_of_the_capacity_or_of_the_disk():
    assert next_mib(1000, capacity=80 * MIB) == 10
    assert next_mib(1000, capacity=80 * MIB, disk_bytes=40 * MIB) == 5
    assert next_mib(0, capacity=16 * MIB) == 2


def test_a_block_larger_than_a_first_extent_has_one_of_its_own():
    shape = shape_for(10 * MIB, BOUNDS, 256 << 10, held=0, disk_bytes=TERABYTE)
    assert shape.slots == 1


def test_a_twentieth_of_a_file_system_stays_free_and_no_more_than_a_gibibyte(tmp_path):
    status = os.statvfs(tmp_path)
    total = status.f_blocks * status.f_frsize
    assert min_free_of(status, None) == min(1 << 30, total // 20)
    assert min_free_of(status, 7) == 7
    assert min_free_of(status, 0) == 0


def test_four_megabytes_of_blocks_take_at_most_sixteen(tmp_path):
    some = KEYS[: 4_200_000 // ROW]
    tier = direct(tmp_path, min_free=None)
    assert store(tier, *some) == [True] * len(some)
    assert used_bytes(tmp_path) <= 16_000_000
    assert [-(-file.stat().st_size // MIB) for file in extent_files(tmp_path)] == [4, 4]
    tier.close()
    tier = direct(tmp_path, min_free=None)
    assert load(tier, *some) == rows(*some)
    tier.close()


def test_a_small_file_system_stores_and_serves_with_default_settings(tmp_path):
    run_on(
        "tmpfs",
        tmp_path,
        """
import subprocess
subprocess.run(["mount", "-o", "remount,size=64M", mnt], check=True)
tier = t.direct(mnt / "root", min_free=None)
for key in t.KEYS:
    t.store(tier, key)
tier.follow()
held = [key for key in t.KEYS if tier.contains([key])[0]]
assert len(held) * t.ROW >= 20 << 20, len(held)
tier.close()
tier = t.direct(mnt / "root", min_free=None)
assert t.load(tier, *held) == t.rows(*held)
tier.close()
""",
    )


def test_a_disk_without_room_for_any_block_is_told_at_the_start(tmp_path, warnings):
    direct(tmp_path, min_free=TERABYTE * 1000).close()
    (said,) = [text for text in warnings() if "nothing can be stored" in text]
    assert "raise capacity, lower min_free, or set root to a larger file system" in said
