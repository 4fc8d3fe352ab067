"""An index that is damaged: wherever that is met, it is made anew by itself, with one warning (C32, C33)."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from kvtier_core.cli.main import main
from kvtier_core.errors import TierOpenError
from kvtier_disk.extents.database import Database, IndexDamagedError
from tests.tiers.extents import KEYS, MIB, direct, drive, index_file, load, rows, store

HELD = KEYS[:60]
PAGE = 4096


def spoil(root: Path, statement: str) -> None:
    """Change the index as no tier would."""
    connection = sqlite3.connect(index_file(root))
    connection.execute(statement)
    connection.commit()
    connection.close()


def test_c32_any_page_of_the_index_may_be_lost(root, warnings):
    home = root / ".kvtier"
    good = index_file(root).read_bytes()
    assert len(good) >= 10 * PAGE
    for page in range(len(good) // PAGE):
        shutil.rmtree(home)
        home.mkdir()
        spoiled = good[: page * PAGE] + bytes(PAGE) + good[(page + 1) * PAGE :]
        (home / "index-000001.db").write_bytes(spoiled)
        before = len(warnings())
        with drive(root, capacity=16 * MIB) as tier:
            assert tier.load(HELD).rows == rows(*HELD), page
            assert tier.store(rows(*KEYS[100:104])).error is None, page
        (warning,) = warnings()[before:]
        assert "made the index anew" in warning


@pytest.mark.parametrize("table", ["owners", "extents", "namespaces", "slots"])
def test_c32_an_index_that_lacks_a_table_is_made_anew_when_the_tier_opens(root, warnings, table):
    spoil(root, f"DROP TABLE {table}")
    with drive(root, capacity=16 * MIB) as tier:
        assert tier.load(HELD).rows == rows(*HELD)
        assert tier.store(rows(*KEYS[100:104])).error is None
    (warning,) = warnings()
    assert f"because the index is damaged (no such table: {table})" in warning


def test_c32_an_extent_without_a_namespace_is_damage(root, warnings):
    spoil(root, "UPDATE extents SET namespace = 77, bytes = bytes * 2")
    with drive(root, capacity=16 * MIB) as tier:
        assert tier.load(HELD).rows == rows(*HELD)
    (warning,) = warnings()
    assert "is in no namespace" in warning


@pytest.mark.parametrize("table", ["slots", "extents"])
def test_c33_damage_that_a_store_meets_is_mended_by_the_next_follow(root, table):
    tier = direct(root, capacity=16 * MIB)
    spoil(root, f"DROP TABLE {table}")
    outcomes = store(tier, *KEYS[100:400])
    assert isinstance(outcomes[-1], IndexDamagedError)
    tier.follow()
    assert store(tier, *KEYS[100:104]) == [True] * 4
    assert load(tier, *HELD) == rows(*HELD)
    tier.close()


def test_c32_c33_an_extent_without_a_namespace_that_a_store_meets_is_mended_by_the_next_follow(tmp_path):
    with drive(tmp_path, capacity=6 * MIB, namespace="other") as other:
        assert other.store(rows(*KEYS[:100], namespace="other")).error is None
    tier = direct(tmp_path, capacity=6 * MIB)
    spoil(tmp_path, "DELETE FROM namespaces WHERE name = 'other'")
    outcomes = store(tier, *KEYS[:100])
    assert isinstance(outcomes[-1], IndexDamagedError)
    tier.follow()
    assert store(tier, *KEYS[100:104]) == [True] * 4
    tier.close()


def test_c30_a_load_that_began_with_the_index_before_is_no_fault(root, monkeypatch):
    tier, other = direct(root, capacity=16 * MIB), direct(root, capacity=16 * MIB)
    store(other, *KEYS[100:104])  # so that the load has to ask the index
    version = Database.version
    begun: list[Database] = []

    def version_during_a_change_over(database: Database) -> int:
        if not begun:
            begun.append(database)
            assert main(["disk", "rebuild", str(root)]) == 0
            tier.follow()
        return version(database)

    monkeypatch.setattr(Database, "version", version_during_a_change_over)
    assert load(tier, *HELD) == rows(*HELD)
    assert tier._store.opened.index.database is not begun[0]
    tier.close()
    other.close()


@pytest.mark.parametrize("table", ["changes", "namespaces", "slots"])
def test_c33_damage_that_a_follow_meets_is_mended_by_it(root, warnings, table):
    tier = direct(root, capacity=16 * MIB)
    load(tier, KEYS[0])
    spoil(root, f"DROP TABLE {table}")
    tier.follow()
    tier.follow()
    assert store(tier, *KEYS[100:104]) == [True] * 4
    assert load(tier, *HELD) == rows(*HELD)
    tier.close()
    (warning,) = warnings()
    assert "made the index anew" in warning


def test_c33_damage_that_a_close_meets_is_mended_by_the_next_start(root):
    tier = direct(root, capacity=16 * MIB)
    spoil(root, "DROP TABLE owners")
    tier.close()
    again = direct(root, capacity=16 * MIB)
    assert load(again, *HELD) == rows(*HELD)
    again.close()


def test_c33_a_damaged_index_that_may_not_be_written_is_named_as_such(root):
    spoil(root, "DROP TABLE slots")
    with pytest.raises(TierOpenError, match=r"index is damaged \(no such table: slots\).*disk rebuild"):
        drive(root, read_only=True)
