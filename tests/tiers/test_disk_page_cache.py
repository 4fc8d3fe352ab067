"""Blocks are read from the page cache where it holds them, and a tier that closes leaves them there."""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier_disk import DiskTier
from kvtier_disk.extents.page_cache import cached_share
from tests.tiers.extents import KEYS, MIB, ROW, direct, extent_files, rows, store, wait_until

KNOWN = KEYS[:20]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """Holds the known blocks in neighbouring slots of one extent, none of it in the page cache."""
    tier = direct(tmp_path / "root", capacity=16 * MIB)
    if not tier._root.direct:
        pytest.skip("no O_DIRECT here")
    store(tier, *KNOWN)
    with opened(tier) as extent:
        read_slots(extent, range(20))
        if not cached_rows(extent):
            pytest.skip("this kernel does not tell what is in the page cache")
    drop(tmp_path / "root")
    yield tier
    tier.close()


@contextmanager
def opened(tier: DiskTier) -> Iterator:
    with tier._store.opened.files._using(1) as extent:
        yield extent


def drop(root: Path) -> None:
    for file in extent_files(root):
        with file.open("rb") as extent:
            os.fsync(extent.fileno())
            os.posix_fadvise(extent.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_rows(extent) -> list[int]:
    """Which of the known blocks' slots are whole in the page cache."""
    offset = extent.shape.row_offset
    return [slot for slot in range(len(KNOWN)) if cached_share(extent.buffered, offset(slot), ROW) == 1.0]


def aligned(count: int) -> Sequence[memoryview]:
    memory = memoryview(mmap.mmap(-1, count * ROW))
    return [memory[at * ROW : (at + 1) * ROW] for at in range(count)]


def load_all(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Load the known blocks; for each call its descriptor, and how many bytes it read."""
    real = os.preadv
    calls = []

    def preadv(fd, buffers, offset):
        done = real(fd, buffers, offset)
        calls.append((fd, done))
        return done

    views = aligned(len(KNOWN))
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", preadv)
        assert tier.load_many(KNOWN, views) == [True] * len(KNOWN)
    assert {key: bytes(view) for key, view in zip(KNOWN, views, strict=True)} == rows(*KNOWN)
    return calls


def read_slots(extent, slots) -> None:
    for slot in slots:
        os.pread(extent.buffered, ROW, extent.shape.row_offset(slot))


def drop_page(extent, slot) -> None:
    """Have the kernel take back one page of a row."""
    os.posix_fadvise(extent.buffered, extent.shape.row_offset(slot), mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)


def test_what_is_in_the_page_cache_is_read_from_there(tier, monkeypatch):
    with opened(tier) as extent:
        read_slots(extent, range(20))
        assert load_all(tier, monkeypatch) == [(extent.buffered, 20 * ROW)]


def test_what_is_not_in_the_page_cache_is_read_past_it_and_stays_out(tier, monkeypatch):
    with opened(tier) as extent:
        assert load_all(tier, monkeypatch) == [(extent.direct, 20 * ROW)]
        assert cached_rows(extent) == []


def test_of_a_run_that_is_cached_in_part_the_rest_is_read_past_the_cache(tier, monkeypatch):
    with opened(tier) as extent:
        read_slots(extent, range(5, 15))
        assert cached_rows(extent) == list(range(5, 15))
        assert load_all(tier, monkeypatch) == [
            (extent.direct, 5 * ROW),
            (extent.buffered, 10 * ROW),
            (extent.direct, 5 * ROW),
        ]


def test_a_row_of_which_a_piece_has_left_the_page_cache_is_still_read_from_there(tier, monkeypatch):
    with opened(tier) as extent:
        read_slots(extent, range(20))
        drop_page(extent, slot=7)
        assert cached_rows(extent) == [*range(7), *range(8, 20)]
        assert load_all(tier, monkeypatch) == [(extent.buffered, 20 * ROW)]
        assert cached_rows(extent) == list(range(20))


def test_a_row_of_which_little_is_in_the_page_cache_is_read_past_it(tier, monkeypatch):
    with opened(tier) as extent:
        os.pread(extent.buffered, 1, extent.shape.row_offset(7))
        assert load_all(tier, monkeypatch) == [(extent.direct, 20 * ROW)]


def test_a_block_written_over_is_never_read_as_it_was_in_the_page_cache(tier, monkeypatch):
    with opened(tier) as extent:
        read_slots(extent, range(20))
        tier.delete(KNOWN)
        others = KEYS[100:120]
        store(tier, *others)
    views = aligned(20)
    assert tier.load_many(others, views) == [True] * 20
    assert {key: bytes(view) for key, view in zip(others, views, strict=True)} == rows(*others)


def test_a_tier_that_closes_leaves_its_blocks_in_the_page_cache(tier, tmp_path):
    tier.close()
    following = direct(tmp_path / "root")
    with opened(following) as extent:
        wait_until(lambda: len(cached_rows(extent)) == len(KNOWN), "the kernel has read all blocks")
    following.close()


def test_no_more_is_left_in_the_page_cache_than_its_bound(tier, tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier_disk.tier._CACHED_AT_END_BYTES", MIB)
    tier.close()
    following = direct(tmp_path / "root")
    with opened(following) as extent:
        assert cached_rows(extent) == []
    following.close()
