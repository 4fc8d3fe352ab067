"""A process that is stopped with a lock of the root in its hands: others wait for it once, not at every turn (C30)."""

import errno
import sqlite3
import threading
import time

import pytest

from kvtier_disk.extents import database
from kvtier_disk.extents import root as root_module
from kvtier_testing.driving import PATIENCE_S
from tests.tiers.extents import KEYS, MIB, A, direct, index_file, load, program, rows, store
from tests.tiers.test_disk_journal import foreign_writer

WAIT_S = 0.5
STORES = KEYS[100:120]

HOLDS_THE_ROOT = """
import pathlib, sys
from kvtier_disk.extents.lock import exclusively
from kvtier_disk.folder import Folder
with exclusively(Folder(pathlib.Path(sys.argv[1]) / ".kvtier"), 10.0):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(root_module, "_HOLD_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(database, "_STUCK_TIMEOUT_S", 0.02)


def timed_out(outcomes: list[bool | Exception]) -> bool:
    return all(isinstance(outcome, OSError) and outcome.errno == errno.ETIMEDOUT for outcome in outcomes)


def test_c30_k13_stores_that_need_an_extent_wait_once_for_a_process_that_holds_the_root(tmp_path):
    tier = direct(tmp_path, capacity=64 * MIB, extent_size="1MiB")
    assert store(tier, *KEYS[:15]) == [True] * 15  # the first extent is full
    holder = program(HOLDS_THE_ROOT, tmp_path)
    assert holder.stdout.readline() == "held\n"
    outcomes: list[bool | Exception] = []
    threads = [threading.Thread(target=lambda key=key: outcomes.extend(store(tier, key))) for key in STORES]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < WAIT_S * len(STORES) / 2
    assert timed_out(outcomes)
    assert "for too long" in str(outcomes[0])
    assert load(tier, A) == rows(A)
    holder.communicate("go on\n")
    assert store(tier, *STORES) == [True] * len(STORES)
    tier.close()


def test_c30_k13_stores_wait_once_for_a_process_that_writes_the_index_for_ever(tmp_path):
    tier = direct(tmp_path, capacity=64 * MIB)
    store(tier, A)
    begin = time.monotonic()
    with foreign_writer(tmp_path):
        outcomes = [outcome for key in STORES for outcome in store(tier, key)]
    assert time.monotonic() - begin < WAIT_S * len(STORES) / 2
    assert timed_out(outcomes)
    assert store(tier, *STORES) == [True] * len(STORES)
    tier.close()


def test_c30_k13_a_look_at_what_others_did_waits_for_a_process_that_is_about_to_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", PATIENCE_S)
    tier = direct(tmp_path, capacity=64 * MIB)
    other = sqlite3.connect(index_file(tmp_path), isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    commit = threading.Timer(WAIT_S, other.execute, ("COMMIT",))
    commit.start()
    tier.follow()
    commit.join()
    other.close()
    tier.close()
