"""The disk tier's bounds: what has to go and when, over all namespaces and processes of a root."""

import errno
import os
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.errors import TierOpenError
from kvtier_disk.extents.room import (
    IDLE_AFTER_S,
    Census,
    ExtentInfo,
    Grow,
    Limits,
    Recycle,
    Take,
    find_room,
    surplus,
)
from kvtier_testing.rows import RowMaker, similar_keys
from tests.tiers.extents import (
    KEYS,
    MIB,
    ROW,
    A,
    B,
    direct,
    drive,
    extent_files,
    load,
    outcome_of,
    program,
    rows,
    store,
    used_bytes,
    wait_until,
)

NOW = 1000.0
MINE, OTHER, THIRD = 1, 2, 3


def census(*extents: tuple[int, int, int], used=None, busy=(), other=0) -> Census:
    """*extents* are (id, namespace, bytes)."""
    infos = [
        ExtentInfo(id=id_, namespace=namespace, bytes=size, is_busy=id_ in busy)
        for id_, namespace, size in extents
    ]
    return Census(extents=infos, used={MINE: NOW, OTHER: NOW, THIRD: NOW} | (used or {}), other_bytes=other)


def limits(capacity=100, free=1000, min_free=0) -> Limits:
    return Limits(capacity=capacity, free_bytes=free, min_free=min_free)


def at(monkeypatch: pytest.MonkeyPatch, seconds: float, real: Callable[[], float] = time.time) -> None:
    """Let the clock be so far ahead."""
    monkeypatch.setattr(time, "time", lambda: real() + seconds)


# Decisions.


def test_c13_an_extent_is_made_while_there_is_room():
    assert find_room(census((1, MINE, 50)), limits(), MINE, 50, NOW) == Grow()
    assert find_room(census((1, MINE, 51)), limits(), MINE, 50, NOW) == Recycle()
    assert find_room(census((1, MINE, 50), other=1), limits(), MINE, 50, NOW) == Recycle()
    assert find_room(census((1, MINE, 51)), limits(capacity=None), MINE, 50, NOW) == Grow()


def test_the_free_space_floor_is_kept_when_an_extent_is_made():
    assert find_room(census((1, MINE, 10)), limits(free=60, min_free=10), MINE, 50, NOW) == Grow()
    assert find_room(census((1, MINE, 10)), limits(free=59, min_free=10), MINE, 50, NOW) == Recycle()


def test_c34_a_namespace_that_nobody_uses_gives_up_its_extents_first_the_least_recently_used_before_others():
    old = {OTHER: NOW - IDLE_AFTER_S - 1, THIRD: NOW - IDLE_AFTER_S - 2}
    full = census((1, MINE, 40), (2, OTHER, 30), (4, THIRD, 15), (3, THIRD, 15), used=old)
    assert find_room(full, limits(), MINE, 20, NOW) == Take((3,))
    without_third = census((1, MINE, 40), (2, OTHER, 60), used=old)
    assert find_room(without_third, limits(), MINE, 20, NOW) == Take((2,))


def test_an_extent_that_is_written_to_is_not_taken():
    full = census((1, MINE, 40), (2, OTHER, 60), used={OTHER: 0.0}, busy={2})
    assert find_room(full, limits(), MINE, 20, NOW) == Recycle()


def test_namespaces_in_use_share_and_none_takes_back_and_forth():
    assert find_room(census((1, OTHER, 50), (2, OTHER, 50)), limits(), MINE, 50, NOW) == Take((1,))
    assert find_room(census((1, MINE, 50), (2, OTHER, 50)), limits(), MINE, 50, NOW) == Recycle()
    larger = census((1, MINE, 20), (2, OTHER, 40), (3, OTHER, 40))
    assert find_room(larger, limits(), MINE, 20, NOW) == Take((2,))
    assert find_room(larger, limits(), OTHER, 20, NOW) == Recycle()


@given(
    st.lists(st.tuples(st.sampled_from([MINE, OTHER, THIRD]), st.integers(1, 40)), max_size=12),
    st.integers(0, 200),
    st.integers(0, 60),
)
def test_surplus_is_enough_and_no_more_than_needed(extents, capacity, min_free):
    held = census(
        *((id_, namespace, size) for id_, (namespace, size) in enumerate(extents)), used={THIRD: 1.0}
    )
    allowed = limits(capacity=capacity, free=50, min_free=min_free)
    going = surplus(held, allowed, MINE)
    sizes = dict(enumerate(size for _, size in extents))
    freed = sum(sizes[id_] for id_ in going)
    needed = max(sum(sizes.values()) - capacity, min_free - 50)
    assert freed >= min(needed, sum(sizes.values()))
    assert not going or freed - sizes[going[-1]] < needed
    namespaces = [extents[id_][0] for id_ in going]
    assert namespaces == sorted(namespaces, key=[THIRD, OTHER, MINE].index)


# For real.


def test_c13_k3_o2_the_root_never_takes_more_than_its_capacity_and_stores_go_on(tmp_path):
    root, capacity = tmp_path / "root", 4 * MIB
    largest = 0
    with drive(root, capacity=capacity, refresh="1h") as tier:
        for round_ in range(50):
            keys = [KEYS[(round_ * 5 + offset) % len(KEYS)] for offset in range(5)]
            assert tier.store(rows(*keys)).error is None
            largest = max(largest, used_bytes(root))
            tier.discard(keys)
            tier.lookup(keys)
        keys = KEYS[300:310]
        assert tier.store(rows(*keys)).error is None
        assert tier.load(keys).rows == rows(*keys)
    assert 10 * ROW < max(largest, used_bytes(root)) <= capacity


def test_c13_capacity_holds_at_every_moment_while_processes_and_namespaces_store(tmp_path):
    root, capacity = tmp_path / "root", 6 * MIB
    text = (
        "import pathlib, sys, json\n"
        "name = sys.argv[2]\n"
        "with t.drive(pathlib.Path(sys.argv[1]), capacity=6 * t.MIB, namespace=name) as tier:\n"
        "    done = 0\n"
        "    for begin in range(0, 400, 8):\n"
        "        keys = t.KEYS[begin : begin + 8]\n"
        "        done += tier.store(t.rows(*keys, namespace=name)).error is None\n"
        "print(json.dumps({'done': done}))\n"
    )
    writers = [program(text, root, name) for name in ("ns", "ns", "other")]
    largest = 0
    while any(writer.poll() is None for writer in writers):
        largest = max(largest, used_bytes(root) if root.exists() else 0)
        time.sleep(0.002)
    assert [outcome_of(writer)["done"] > 0 for writer in writers] == [True] * 3
    assert 3 * MIB < largest <= capacity


def test_c13_space_is_given_back_when_the_capacity_shrinks(tmp_path):
    with drive(tmp_path, capacity=16 * MIB) as tier:
        assert tier.store(rows(*KEYS[:200])).error is None
    assert used_bytes(tmp_path) > 8 * MIB
    with drive(tmp_path, capacity=6 * MIB) as tier:
        assert used_bytes(tmp_path) <= 6 * MIB
        left = tier.load(KEYS[:200]).rows
        assert 0 < len(left) < 100
        assert left.items() <= rows(*KEYS[:200]).items()
        assert tier.store(rows(*KEYS[200:230])).error is None
    assert used_bytes(tmp_path) <= 6 * MIB


def test_c34_what_nobody_uses_any_more_goes_first(tmp_path, monkeypatch):
    with drive(tmp_path, capacity=6 * MIB, namespace="dead") as tier:
        assert tier.store(rows(*KEYS[:60], namespace="dead")).error is None
    before = len(list((tmp_path / "dead").glob("*.ext")))
    later = time.time() + IDLE_AFTER_S + 10
    monkeypatch.setattr(time, "time", lambda: later)
    with drive(tmp_path, capacity=6 * MIB) as tier:
        keys = KEYS[:60]
        for begin in range(0, 60, 4):
            assert tier.store(rows(*keys[begin : begin + 4])).error is None
        assert tier.load(keys).rows == rows(*keys)
    assert len(list((tmp_path / "dead").glob("*.ext"))) < before - 2


def test_c34_a_namespace_used_when_the_clock_was_ahead_goes_first_all_the_same(tmp_path, monkeypatch):
    at(monkeypatch, 100_000)
    with drive(tmp_path, capacity=6 * MIB, namespace="dead") as dead:
        assert dead.store(rows(*KEYS[:60], namespace="dead")).error is None
    at(monkeypatch, 0)
    tier = direct(tmp_path, capacity=6 * MIB)
    store(tier, A)
    tier.follow()
    at(monkeypatch, IDLE_AFTER_S + 10)
    for begin in range(0, 60, 4):
        assert store(tier, *KEYS[begin : begin + 4]) == [True] * 4
    assert load(tier, *KEYS[:60]) == rows(*KEYS[:60])
    tier.close()


def test_blocks_of_different_sizes_share_the_capacity(tmp_path):
    large = RowMaker("large", 500_000)
    with (
        drive(tmp_path, capacity=8 * MIB) as small_tier,
        drive(tmp_path, capacity=8 * MIB, namespace="large", row_bytes=large.row_bytes) as large_tier,
    ):
        for begin in range(0, 60, 6):
            small = rows(*KEYS[begin : begin + 6])
            wait_until(lambda small=small: small_tier.store(small).error is None, "room for small blocks")
            key = KEYS[begin]
            block = {key: large.make(key)}
            # Extents that the other tier is still writing into are given up at its next `refresh`.
            wait_until(lambda block=block: large_tier.store(block).error is None, "room for a large block")
            assert large_tier.load([key]).rows == block
            assert used_bytes(tmp_path) <= 8 * MIB


def test_blocks_whose_extent_another_namespace_took_unheard_of_do_not_stop_a_store(tmp_path):
    tier = direct(tmp_path, capacity=6 * MIB)
    for begin in range(0, 120, 4):
        assert store(tier, *KEYS[begin : begin + 4]) == [True] * 4
    other = direct(tmp_path, capacity=6 * MIB, namespace="other")
    for begin in range(0, 120, 4):  # takes extents until both hold as much
        assert store(other, *KEYS[begin : begin + 4], namespace="other") == [True] * 4
    for begin in range(200, 300, 4):
        assert store(tier, *KEYS[begin : begin + 4]) == [True] * 4
    assert load(tier, *KEYS[290:300]) == rows(*KEYS[290:300])
    other.close()
    tier.close()


def test_one_namespace_with_two_sizes_of_block_keeps_them_apart(tmp_path):
    other = RowMaker("ns", 100_000)
    with drive(tmp_path) as tier, drive(tmp_path, row_bytes=other.row_bytes) as other_tier:
        tier.store(rows(A))
        assert other_tier.lookup([A]) == [False]
        other_tier.store({A: other.make(A)})
        assert other_tier.load([A]).rows == {A: other.make(A)}
        assert tier.load([A]).rows == rows(A)


def test_within_a_namespace_the_policy_says_what_goes(tmp_path):
    with drive(tmp_path, capacity=4 * MIB, threads=1) as tier:
        for begin in range(0, 30, 5):
            assert tier.store(rows(*KEYS[begin : begin + 5])).error is None
        for begin in range(30, 100, 5):
            tier.touch([KEYS[0]])
            assert tier.load([KEYS[1]]).rows
            assert tier.store(rows(*KEYS[begin : begin + 5])).error is None
        assert tier.lookup([KEYS[0], KEYS[1], KEYS[2], KEYS[99]]) == [True, True, False, True]


def test_c14_the_order_of_eviction_survives_a_restart(tmp_path):
    for begin in range(0, 40, 10):
        with drive(tmp_path, capacity=4 * MIB) as tier:
            assert tier.store(rows(*KEYS[begin : begin + 10])).error is None
    last = direct(tmp_path, capacity=4 * MIB)
    present = last.contains(KEYS[:40])
    assert present[30:] == [True] * 10
    assert list(present) == sorted(present)  # what is missing is what was stored first
    last.close()


def test_c54_an_unknown_policy_is_refused_before_anything_is_opened(tmp_path):
    with pytest.raises(TierOpenError, match="unknown eviction policy 'best'"):
        drive(tmp_path / "root", policy="best")
    assert not (tmp_path / "root").exists()


def test_c54_a_capacity_without_room_for_one_block_is_refused_with_what_to_set(tmp_path):
    with pytest.raises(TierOpenError, match=r"no room for one block and the index: set it to .* at least"):
        drive(tmp_path, capacity=ROW + 4096)
    assert not list(tmp_path.glob("*/*.ext"))


def test_c52_blocks_past_their_time_to_live_go(tmp_path, monkeypatch):
    tier = direct(tmp_path, ttl="10s")
    store(tier, *KEYS[:3])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 9)
    store(tier, KEYS[3])
    tier.follow()
    assert tier.contains(KEYS[:4]) == [True] * 4
    monkeypatch.setattr(time, "time", lambda: real() + 11)
    tier.follow()
    assert tier.contains(KEYS[:4]) == [False, False, False, True]
    assert load(tier, *KEYS[:4]) == rows(KEYS[3])
    tier.close()


def test_c52_a_block_past_its_time_is_not_served_although_nobody_has_looked_yet(tmp_path, monkeypatch):
    tier = direct(tmp_path, ttl="10s")
    store(tier, A, B)
    at(monkeypatch, 9)
    assert load(tier, A, B) == rows(A, B)
    at(monkeypatch, 11)
    assert load(tier, A, B) == {}
    assert store(tier, A) == [True]
    assert load(tier, A, B) == rows(A)
    tier.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_c52_any_number_of_blocks_past_their_time_is_gone_at_once(tmp_path, monkeypatch, read_only):
    small = RowMaker("ns", 1000)
    keys = similar_keys(3000)
    writer = direct(tmp_path, row_bytes=small.row_bytes)
    for begin in range(0, len(keys), 500):
        part = keys[begin : begin + 500]
        assert writer.store_many(part, [memoryview(small.make(key)) for key in part]) == [True] * len(part)
    reader = direct(tmp_path, row_bytes=small.row_bytes, ttl="10s", read_only=read_only)
    assert all(reader.contains(keys))
    at(monkeypatch, 11)
    reader.follow()
    assert not any(reader.contains(keys))
    again = direct(tmp_path, row_bytes=small.row_bytes, ttl="10s", read_only=read_only, refresh="1h")
    assert not any(again.contains(keys))
    for tier in (again, reader, writer):
        tier.close()


def test_c52_a_clock_that_is_put_back_lets_no_block_stay_for_ever(tmp_path, monkeypatch):
    at(monkeypatch, 1000)
    tier = direct(tmp_path, ttl="10s")
    store(tier, A)
    tier.follow()
    at(monkeypatch, 0)
    store(tier, B)
    tier.follow()
    assert load(tier, A, B) == rows(A, B)
    at(monkeypatch, 11)
    tier.follow()
    assert tier.contains([A, B]) == [False, False]
    tier.close()


def test_c52_a_clock_that_was_put_back_between_two_starts_lets_no_block_stay_for_ever(tmp_path, monkeypatch):
    at(monkeypatch, 1000)
    tier = direct(tmp_path, ttl="10s")
    store(tier, A)
    tier.close()
    at(monkeypatch, 0)
    tier = direct(tmp_path, ttl="10s")
    assert load(tier, A) == rows(A)
    at(monkeypatch, 11)
    tier.follow()
    assert tier.contains([A]) == [False]
    tier.close()


def test_the_free_space_floor_gives_room_back(tmp_path, monkeypatch):
    tier = direct(tmp_path, min_free=1000 * MIB)
    store(tier, *KEYS[:10])
    real = os.statvfs

    class Fuller:
        def __init__(self, status):
            self.f_frsize, self.f_blocks = status.f_frsize, status.f_blocks
            self.f_bavail = 999 * MIB // status.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Fuller(real(path)))
    tier.follow()
    assert tier.contains(KEYS[:10]) == [False] * 10
    assert extent_files(tmp_path) == []
    (outcome,) = store(tier, A)
    assert isinstance(outcome, OSError)
    assert outcome.errno == errno.ENOSPC
    assert "min_free" in str(outcome)
    monkeypatch.undo()
    assert store(tier, A) == [True]
    tier.close()


def test_many_threads_make_room_together(tmp_path):
    tier = direct(tmp_path, capacity=6 * MIB)
    failed: list[object] = []

    def work(number: int) -> None:
        for begin in range(number * 60, number * 60 + 60, 3):
            failed.extend(outcome for outcome in store(tier, *KEYS[begin : begin + 3]) if outcome is not True)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    there = load(tier, *KEYS[:360])
    assert there.items() <= rows(*KEYS[:360]).items()
    assert len(there) > 30
    assert used_bytes(tmp_path) <= 6 * MIB
    tier.close()
