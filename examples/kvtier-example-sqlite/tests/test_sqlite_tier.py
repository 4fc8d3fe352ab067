"""The tests that every tier must pass, and what only this one can do wrong."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier_core import TierOpenError
from kvtier_core.tier import TierContext
from kvtier_example_sqlite import SqliteTier
from kvtier_testing.rows import similar_keys
from kvtier_testing.tiers import TierTests

ROW_BYTES = 4096
A, B = similar_keys(2)

STORE_UNTIL_KILLED = """
import sys
from kvtier_core.tier import TierContext
from kvtier_testing.rows import similar_keys
from kvtier_example_sqlite import SqliteTier

tier = SqliteTier(SqliteTier.Settings(type="sqlite", path=sys.argv[1]),
                  TierContext(name="t", namespace="ns", row_bytes=4096))
tier.open()
keys = similar_keys(1000)
while True:
    for index, key in enumerate(keys):
        tier.store(key, memoryview(bytes([index % 251]) * 4096))
        print(index, flush=True)
"""


def make_tier(path: Path, namespace: str = "ns") -> SqliteTier:
    settings = SqliteTier.Settings(type="sqlite", path=path)
    return SqliteTier(settings, TierContext(name="t", namespace=namespace, row_bytes=ROW_BYTES))


class TestSqlite(TierTests):
    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return SqliteTier

    @pytest.fixture
    def tier_settings(self, tmp_path: Path) -> Mapping[str, object]:
        return {"path": tmp_path / "below" / "blocks.sqlite"}


def test_c32_a_killed_process_leaves_whole_blocks(tmp_path: Path) -> None:
    path = tmp_path / "blocks.sqlite"
    with subprocess.Popen(
        [sys.executable, "-c", STORE_UNTIL_KILLED, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == 20:
                break
        os.kill(writer.pid, signal.SIGKILL)
    tier = make_tier(path)
    tier.open()
    keys = similar_keys(1000)
    found = list(tier.scan())
    assert len(found) > 20
    for block in found:
        into = bytearray(ROW_BYTES)
        assert tier.load(block.key, memoryview(into))
        assert into == bytes([keys.index(block.key) % 251]) * ROW_BYTES
    tier.store(A, memoryview(bytes(ROW_BYTES)))
    tier.close()


def test_two_processes_may_use_one_file(tmp_path: Path) -> None:
    one, other = (make_tier(tmp_path / "blocks.sqlite") for _ in range(2))
    one.open()
    other.open()
    one.store(A, memoryview(bytes(ROW_BYTES)))
    other.store(B, memoryview(bytes(ROW_BYTES)))
    assert one.contains([A, B]) == other.contains([A, B]) == [True, True]
    one.close()
    other.close()


def test_c33_a_file_that_is_no_database_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "blocks.sqlite"
    path.write_text("not a database, but longer than the header that SQLite looks at first" * 20)
    tier = make_tier(path)
    with pytest.raises(TierOpenError, match=r"tier 't' .*blocks\.sqlite.*not a database; set path"):
        tier.open()
    tier.close()
    tier.close()
    assert path.read_text().startswith("not a database")


def test_c33_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tier = make_tier(tmp_path / "file" / "blocks.sqlite")
    with pytest.raises(TierOpenError, match="set path"):
        tier.open()
    tier.close()


def test_c33_a_full_disk_fails_the_store_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "blocks.sqlite"
    tier = make_tier(path)
    tier.open()
    tier.store(A, memoryview(bytes(ROW_BYTES)))
    tier._db.execute("PRAGMA max_page_count = 4")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        tier.store(B, memoryview(bytes(64 * ROW_BYTES)))
    assert tier.contains([A, B]) == [True, False]
    tier.close()


def test_a_block_of_another_size_is_a_fault(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "blocks.sqlite")
    tier.open()
    tier.store(A, memoryview(bytes(ROW_BYTES)))
    with pytest.raises(ValueError, match="different structures"):
        tier.load(A, memoryview(bytearray(2 * ROW_BYTES)))
    tier.close()
