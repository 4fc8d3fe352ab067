"""The index's journal counts as what it takes, and nobody waits long for who is in its way (C13, C30, K13)."""

import errno
import sqlite3
import threading
import time
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kvtier_disk.extents import room, upkeep
from kvtier_testing.driving import PATIENCE_S
from tests.tiers.extents import (
    KEYS,
    MIB,
    A,
    B,
    direct,
    extent_files,
    index_file,
    load,
    rows,
    store,
    used_bytes,
)
from tests.tiers.small_disk import run_on

CAPACITY = 8 * MIB


@contextmanager
def foreign_reader(root):
    """Somebody who looks at the index and does not go on: a paused process, a backup, an sqlite3 shell."""
    with closing(sqlite3.connect(index_file(root), isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM extents").fetchone()
        yield connection


@contextmanager
def foreign_writer(root):
    with closing(sqlite3.connect(index_file(root), isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("ROLLBACK")


def test_c13_c30_a_reader_that_never_ends_stops_the_stores_and_not_the_capacity(tmp_path):
    tier = direct(tmp_path, capacity=CAPACITY)
    store(tier, *KEYS[:200])
    held = [key for key, there in zip(KEYS[:200], tier.contains(KEYS[:200]), strict=True) if there]
    with foreign_reader(tmp_path):
        outcome = store(tier, *KEYS[200:204])[-1]
        assert isinstance(outcome, OSError)
        assert outcome.errno == errno.ETIMEDOUT
        assert "another process has kept the index busy" in str(outcome)
        assert load(tier, *held) == rows(*held)
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            tier.follow()
        assert time.monotonic() - begin < PATIENCE_S / 4
        assert load(tier, *held) == rows(*held)
        assert used_bytes(tmp_path) <= CAPACITY
    assert store(tier, *KEYS[200:204]) == [True] * 4
    assert load(tier, *KEYS[200:204]) == rows(*KEYS[200:204])
    tier.close()


def test_c13_a_journal_that_others_have_made_long_is_cut_by_the_next_store(tmp_path):
    tier = direct(tmp_path, capacity=CAPACITY, extent_size="1MiB")
    store(tier, *KEYS[:100])
    journal = index_file(tmp_path).with_name(f"{index_file(tmp_path).name}-journal")
    with journal.open("ab") as file:
        file.write(bytes(2 * MIB))
    assert used_bytes(tmp_path) > CAPACITY
    assert store(tier, *KEYS[200:204]) == [True] * 4
    assert used_bytes(tmp_path) <= CAPACITY
    tier.close()


THREE_WRITERS = """
import os, random, time
from kvtier_testing.rows import RowMaker
from kvtier_core.values import TierContext
root, capacity = mnt / "root", 12 * t.MIB
def write(name, payload):
    maker = RowMaker(name, payload)
    context = TierContext(name="disk", namespace=name, row_bytes=maker.row_bytes, capacity_bytes=capacity)
    tier = t.DiskTier(t.settings(root, extent_size="1MiB"), context)
    tier.open()
    rows = {key: maker.make(key) for key in t.KEYS[:300]}
    done = 0
    for turn in range(120):
        keys = random.Random(turn).sample(t.KEYS[:300], 12)
        done += tier.store_many(keys, [memoryview(rows[key]) for key in keys]).count(True)
        tier.follow()
    tier.close()
    return 0 if done else 1
def free():
    status = os.statvfs(mnt)  # of all files at one moment
    return status.f_bfree * status.f_frsize
before, least = free(), free()
writers = [disk.child(lambda kind=kind: write(*kind)) for kind in (("a", 64_000), ("b", 200_000), ("c", 8000))]
while writers:
    least = min(least, free())
    ended, status = os.waitpid(-1, os.WNOHANG)
    if ended:
        writers.remove(ended)
        assert status == 0, status
    time.sleep(0.001)
assert capacity // 2 < before - least <= capacity, before - least
"""


def test_c13_capacity_holds_while_processes_with_blocks_of_three_sizes_store(tmp_path):
    run_on("ext4 in blocks of 4 KiB", tmp_path, THREE_WRITERS)


def test_c13_of_two_that_count_at_once_only_one_takes_the_last_room(tmp_path, monkeypatch):
    one, other = direct(tmp_path, capacity=CAPACITY), direct(tmp_path, capacity=CAPACITY)
    overtaken: list[int] = []

    def find_room(*arguments: Any) -> room.Grow | room.Take | room.Recycle:
        choice = room.find_room(*arguments)
        if not overtaken and isinstance(choice, room.Grow):
            overtaken.append(0)
            store(other, *KEYS)  # as another process would, between the count and what follows from it
            overtaken[0] = len(extent_files(tmp_path))
        return choice

    monkeypatch.setattr(upkeep, "find_room", find_room)
    store(one, A)
    assert 0 < len(extent_files(tmp_path)) <= overtaken[0]
    one.close()
    other.close()


def test_c30_k13_a_process_that_is_stopped_while_it_writes_fails_stores_and_holds_up_no_load(tmp_path):
    tier = direct(tmp_path, capacity=CAPACITY)
    store(tier, A)
    outcomes: list[bool | Exception] = []
    with foreign_writer(tmp_path):
        thread = threading.Thread(target=lambda: outcomes.extend(store(tier, B)))
        thread.start()
        loads = 0
        while thread.is_alive():
            assert load(tier, A) == rows(A)
            loads += thread.is_alive()
        thread.join()
    (outcome,) = outcomes
    assert isinstance(outcome, OSError)
    assert outcome.errno == errno.ETIMEDOUT
    assert "another process has kept the index busy" in str(outcome)
    assert loads > 1
    assert store(tier, B) == [True]
    tier.close()


@pytest.mark.parametrize("other", [foreign_reader, foreign_writer])
def test_k13_what_others_have_stored_is_learned_beside_any_other_process(tmp_path, other):
    one, two = direct(tmp_path, capacity=CAPACITY), direct(tmp_path, capacity=CAPACITY)
    store(one, A)
    with other(tmp_path):
        two.follow()
        assert load(two, A) == rows(A)
    one.close()
    two.close()
