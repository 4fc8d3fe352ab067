"""An index that is damaged: wherever that is met, it is made anew by itself, with one warning (C32, C33)."""

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from kvtier.main import main
from kvtier_core.errors import TierOpenError
from kvtier_disk.extents.change_log import pack
from kvtier_disk.extents.database import Database
from kvtier_disk.extents.statements import IndexDamagedError
from tests.tiers.extents import (
    KEYS,
    MIB,
    A,
    direct,
    drive,
    index_file,
    load,
    outcome_of,
    program,
    rows,
    store,
    wait_until,
)

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


@pytest.mark.parametrize("size", [0, 100, PAGE, 2 * PAGE])
def test_s1_an_index_that_was_cut_between_starts_is_made_anew_with_one_warning(root, warnings, size):
    with index_file(root).open("r+b") as file:
        file.truncate(size)
    with drive(root, capacity=16 * MIB) as tier:
        assert tier.load(HELD).rows == rows(*HELD)
        assert tier.store(rows(*KEYS[100:104])).error is None
    (warning,) = warnings()
    assert "made the index anew" in warning


def test_s19_a_directory_in_the_place_of_the_index_is_in_nobodys_way(root, warnings):
    file = index_file(root)
    file.unlink()
    file.mkdir()
    (file / "precious").write_bytes(b"precious")
    for _ in range(2):
        with drive(root, capacity=16 * MIB) as tier:
            assert tier.load(HELD).rows == rows(*HELD)
            assert tier.store(rows(*KEYS[100:104])).error is None
    assert (file / "precious").read_bytes() == b"precious"
    (warning,) = warnings()
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


@pytest.mark.parametrize("read_only", [False, True])
def test_c33_an_index_that_is_deleted_while_it_is_opened_counts_as_absent(
    root, read_only, monkeypatch, warnings
):
    set_up = Database._set_up

    def delete_it(database):
        monkeypatch.undo()
        database.path.unlink()
        set_up(database)

    monkeypatch.setattr(Database, "_set_up", delete_it)
    if read_only:
        with pytest.raises(TierOpenError, match="holds no index, and the tier is configured read_only"):
            drive(root, capacity=16 * MIB, read_only=True)
        return
    with drive(root, capacity=16 * MIB) as tier:
        assert tier.load(HELD).rows == rows(*HELD)
    assert [text for text in warnings() if "made the index anew" in text] != []


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


def test_s1_any_bit_of_the_schema_may_flip(root, warnings):
    home = root / ".kvtier"
    good = index_file(root).read_bytes()
    first = good.index(b"CREATE TABLE namespaces")
    last = good.rindex(b"CREATE TABLE", 0, PAGE * 2)
    rng = random.Random(1)
    for at in sorted(rng.sample(range(min(first, last), PAGE), 120)):
        spoiled = bytearray(good)
        spoiled[at] ^= 1 << rng.randrange(8)
        shutil.rmtree(home)
        home.mkdir()
        (home / "index-000001.db").write_bytes(spoiled)
        before = len(warnings())
        with drive(root, capacity=16 * MIB) as tier:
            assert tier.load(HELD).rows == rows(*HELD), at
            assert tier.store(rows(*KEYS[100:104])).error is None, at
        (warning,) = warnings()[before:]
        assert "made the index anew" in warning


WRONG_VALUES = {
    "a key that is text": "UPDATE slots SET key = 'text' WHERE key IS NOT NULL",
    "a key that is no text": "UPDATE slots SET key = CAST(x'ff80' AS TEXT) WHERE key IS NOT NULL",
    "a key without bytes": "UPDATE slots SET key = x'' WHERE key IS NOT NULL",
    "a key that is too long": "UPDATE slots SET key = zeroblob(49) WHERE key IS NOT NULL",
    "a name that leads out of the root": "UPDATE namespaces SET name = '../' || name",
    "a name that is a number": "UPDATE namespaces SET name = x'00'",
    "a size that no block has": "UPDATE namespaces SET row_bytes = -1",
    "a sign of life somewhere else": "INSERT INTO owners (lock, namespace) VALUES ('../../x' || char(0), 1)",
    "an extent that is too large": "UPDATE extents SET bytes = bytes + 4096",
    "slots without end": "UPDATE extents SET slots = 1 << 40",
    "an extent whose number has no room": "UPDATE extents SET id = 1 << 60 WHERE id = 1",
    "numbers that are at their end": "UPDATE sqlite_sequence SET seq = 9223372036854775807",
    "an index of another form": "PRAGMA user_version = 7",
}


@pytest.mark.parametrize("statement", WRONG_VALUES.values(), ids=WRONG_VALUES.keys())
def test_s1_a_value_that_can_not_be_is_damage_at_the_start(root, warnings, statement):
    spoil(root, statement)
    with drive(root, capacity=16 * MIB) as tier:
        assert tier.load(HELD).rows == rows(*HELD)
        assert tier.store(rows(*KEYS[100:400])).error is None
    (warning,) = warnings()
    assert "made the index anew" in warning


@pytest.mark.parametrize("statement", WRONG_VALUES.values(), ids=WRONG_VALUES.keys())
def test_s1_a_value_that_can_not_be_never_stops_a_tier_that_runs(root, statement):
    with drive(root, capacity=16 * MIB) as tier:
        spoil(root, statement)
        tier.store(rows(*KEYS[100:104]))  # may meet it
        wait_until(lambda: tier.store(rows(*KEYS[100:104])).error is None, "stores work")
        assert tier.load(KEYS[100:104]).rows == rows(*KEYS[100:104])
        assert tier.load(HELD).rows == rows(*HELD)


def spoil_behind(root: Path, name: str, statement: str) -> None:
    """Change the slots behind the back of their index *name*, as a write that never reached the disk leaves them."""
    connection = sqlite3.connect(index_file(root))
    entry = connection.execute("SELECT * FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    for change, values in (
        ("DELETE FROM sqlite_master WHERE name = ?", (name,)),
        (statement, ()),
        ("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", entry),
    ):
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(change, values)
        connection.commit()
        connection.close()  # what it knows of the schema is as it was before
        connection = sqlite3.connect(index_file(root))
    connection.close()


FREE_THAT_ARE_NOT = {
    "slots that hold blocks": "UPDATE slots SET key = zeroblob(36), time = 1 WHERE key IS NULL",
    "slots that are claimed": "UPDATE slots SET owner = 77 WHERE key IS NULL",
    "slots of other namespaces": "UPDATE slots SET namespace = 77 WHERE key IS NULL",
    "slots that are not there": "DELETE FROM slots WHERE key IS NULL",
    "places that are elsewhere": "UPDATE slots SET place = place + (50 << 24) WHERE key IS NULL",
}


@pytest.mark.parametrize("statement", FREE_THAT_ARE_NOT.values(), ids=FREE_THAT_ARE_NOT.keys())
def test_s1_free_slots_that_are_not_free_stop_no_stores(root, warnings, statement):
    with drive(root, capacity=16 * MIB) as tier:
        tier.store(rows(KEYS[60]))  # so that there are free slots: those of a new extent
        spoil_behind(root, "free_slots", statement)
        wait_until(lambda: tier.store(rows(*KEYS[100:104])).error is None, "stores work")
        assert tier.load(KEYS[100:104]).rows == rows(*KEYS[100:104])
        assert tier.load(HELD).rows == rows(*HELD)
    (warning,) = [text for text in warnings() if "made the index anew" in text]
    assert "slots are called free that are not" in warning


@pytest.mark.parametrize("pairs", [b"", b"\1", bytes(12), b"\xff" * 40, pack([(A, 5)])[:-1], pack([(A, -5)])])
def test_s1_a_change_that_can_not_be_read_is_damage(root, warnings, pairs):
    tier, other = direct(root, capacity=16 * MIB), direct(root, capacity=16 * MIB)
    store(other, KEYS[100])
    connection = sqlite3.connect(index_file(root))
    connection.execute(
        "UPDATE changes SET pairs = ? WHERE number = (SELECT max(number) FROM changes)", (pairs,)
    )
    connection.commit()
    connection.close()
    tier.follow()
    assert load(tier, *HELD) == rows(*HELD)
    assert store(tier, *KEYS[100:104]) == [True] * 4
    assert any("made the index anew" in warning for warning in warnings())
    tier.close()
    other.close()


SHORTENED = """
import pathlib, sys
root = pathlib.Path(sys.argv[1])
tier, other = t.direct(root, capacity=16 * t.MIB), t.direct(root, capacity=16 * t.MIB)
t.store(other, *t.KEYS[:8])
for size in (0, 1, 4095, 4096):
    for path in sorted((root / ".kvtier").iterdir()):
        if path.is_file():
            with path.open("r+b") as file:
                file.truncate(size)
    for one in (tier, other):
        one.load_many(t.KEYS[:8], [memoryview(bytearray(t.ROW)) for _ in range(8)])
        t.store(one, *t.KEYS[8:16])
    for one in (tier, other):
        one.follow()
        assert t.store(one, *t.KEYS[8:16]) == [True] * 8
        assert t.load(one, *t.KEYS[8:16]) == t.rows(*t.KEYS[8:16])
tier.close()
other.close()
print('{"ended": 1}')
"""


def test_s4_files_of_the_index_cut_short_under_a_running_engine_do_not_end_it(root):
    assert outcome_of(program(SHORTENED, root)) == {"ended": 1}


MAPPED = """
import json, pathlib, sys
root = pathlib.Path(sys.argv[1])
tier = t.direct(root, capacity=16 * t.MIB)
t.store(tier, *t.KEYS[:8])
lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
print(json.dumps({"mapped": sum(str(root) in line for line in lines)}))
tier.close()
"""


def test_s4_no_file_of_the_root_is_mapped_into_memory(root):
    connection = sqlite3.connect(index_file(root))
    connection.execute(
        "PRAGMA journal_mode = WAL"
    )  # as the header of an older index, or of a damaged one, may say
    connection.close()
    assert outcome_of(program(MAPPED, root)) == {"mapped": 0}
