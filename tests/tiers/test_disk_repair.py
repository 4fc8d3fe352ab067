"""Damage to a disk tier's files: never wrong bytes, clear counts, and the tier goes on (C03, C32)."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from kvtier.main import main
from kvtier_core.keys import OffloadKey
from kvtier_disk.extents.form import HEADER_BYTES, Shape, place_of, read_entry, read_header
from kvtier_testing.rows import RowMaker
from tests.tiers.extents import (
    KEYS,
    MAKER,
    MIB,
    ROW,
    A,
    B,
    direct,
    drive,
    extent_files,
    index_file,
    load,
    rows,
    store,
    wait_until,
)

HELD = KEYS[:12]


def shape_of(file: Path) -> Shape:
    header = read_header(file.read_bytes()[:HEADER_BYTES])
    assert header is not None
    return header[1]


def change(file: Path, offset: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(content)


def served(root: Path) -> tuple[set[OffloadKey], set[OffloadKey]]:
    """Keys of which the tier gives the right row, and those of which it gives another: the core refuses those."""
    with drive(root, capacity=16 * MIB) as tier:
        loaded = tier.load(HELD)
        assert not loaded.result.failed
        right = {key for key, row in loaded.rows.items() if row == MAKER.make(key)}
        assert not any(MAKER.proves(key, row) for key, row in loaded.rows.items() if key not in right)
        assert_goes_on(tier)
        return right, set(loaded.rows) - right


def assert_goes_on(tier) -> None:
    """Everything can be stored: what was refused is discarded by the core first, what was lost is found to be."""
    tier.store(rows(*HELD, *KEYS[20:30]))
    loaded = tier.load(HELD)
    tier.discard([key for key, row in loaded.rows.items() if row != MAKER.make(key)])
    assert tier.store(rows(*HELD, *KEYS[20:30])).error is None
    assert tier.load([*HELD, *KEYS[20:30]]).rows == rows(*HELD, *KEYS[20:30])


# Extents.


@pytest.mark.parametrize("offset", [0, 1, 5000, ROW - 65])
def test_c03_a_flipped_byte_is_refused_by_its_proof_and_stored_again(root, offset):
    (file,) = extent_files(root)
    at = shape_of(file).row_offset(3) + offset
    change(file, at, bytes([file.read_bytes()[at] ^ 1]))
    assert served(root) == ({*HELD} - {HELD[3]}, {HELD[3]})


@pytest.mark.parametrize("offset", [ROW - 64, ROW - 40, ROW - 20, ROW - 1])
def test_c03_a_flipped_byte_in_the_proof_is_a_miss(root, offset):
    (file,) = extent_files(root)
    at = shape_of(file).row_offset(3) + offset
    change(file, at, bytes([file.read_bytes()[at] ^ 1]))
    right, refused = served(root)
    assert right == {*HELD} - {HELD[3]}
    assert refused <= {HELD[3]}


def test_c03_swapped_slots_are_evicted_and_no_integrity_fault(root):
    (file,) = extent_files(root)
    shape = shape_of(file)
    content = file.read_bytes()
    two, five = (content[shape.row_offset(slot) : shape.row_offset(slot) + ROW] for slot in (2, 5))
    change(file, shape.row_offset(2), five)
    change(file, shape.row_offset(5), two)
    assert served(root) == ({*HELD} - {HELD[2], HELD[5]}, set())


def test_c03_zeroed_pages_are_refused(root):
    (file,) = extent_files(root)
    shape = shape_of(file)
    change(file, shape.row_offset(1), bytes(4096))
    change(file, shape.row_offset(4), bytes(ROW))
    assert served(root) == ({*HELD} - {HELD[1], HELD[4]}, {HELD[1], HELD[4]})


def test_c32_k6_o1_a_truncated_extent_is_forgotten_at_the_next_start(root):
    (file,) = extent_files(root)
    os.truncate(file, shape_of(file).row_offset(6) + 100)
    assert served(root) == (set(), set())


def test_b9_c32_blocks_that_are_cut_off_under_a_running_tier_count_as_damaged(root, warnings):
    with drive(root, capacity=16 * MIB) as tier:
        (file,) = extent_files(root)
        os.truncate(file, shape_of(file).row_offset(6) + 100)
        for _ in range(3):
            loaded = tier.load(HELD)
            assert loaded.rows == rows(*HELD[:6]) | dict.fromkeys(HELD[6:], bytes(ROW))
            assert not any(MAKER.proves(key, loaded.rows[key]) for key in HELD[6:])
        (warning,) = warnings()
        assert f"{file} was cut to {shape_of(file).row_offset(6) + 100} bytes" in warning
        tier.discard(HELD[6:])  # as the core does
        wait_until(lambda: tier.lookup(HELD) == [True] * 6 + [False] * 6, "they are served no more")
        assert_goes_on(tier)


def test_b9_c32_an_extent_that_others_took_away_counts_as_evicted(root, warnings):
    with drive(root, capacity=16 * MIB) as tier:
        assert tier.load(HELD).rows == rows(*HELD)
        (file,) = extent_files(root)
        os.truncate(file, 0)
        loaded = tier.load(HELD)
        assert loaded.rows == {}
        assert loaded.result.missing == tuple(HELD)
        assert not any("was cut" in warning for warning in warnings())


def test_c33_a_deleted_extent_is_a_miss_and_makes_room(root):
    (file,) = extent_files(root)
    file.unlink()
    assert served(root) == (set(), set())


def test_c33_an_extent_that_is_deleted_under_a_running_tier_is_a_miss(root):
    with drive(root, capacity=16 * MIB) as tier:
        for file in extent_files(root):
            file.unlink()
        assert tier.load(HELD).result.missing == tuple(HELD)
        wait_until(lambda: tier.store(rows(*HELD)).error is None, "blocks can be stored again")
        assert tier.load(HELD).rows == rows(*HELD)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir])
def test_c33_what_stands_in_an_extents_place_is_a_miss_that_nobody_waits_for(root, make):
    (file,) = extent_files(root)
    file.unlink()
    make(file)
    with drive(root, capacity=16 * MIB) as tier:
        assert tier.load(HELD).rows == {}
        assert_goes_on(tier)


def test_c33_a_pipe_that_comes_to_stand_in_an_extents_place_is_a_miss(root):
    with drive(root, capacity=16 * MIB) as tier:
        (file,) = extent_files(root)
        file.unlink()
        os.mkfifo(file)
        assert tier.load(HELD).result.missing == tuple(HELD)


def test_c02_an_extent_of_a_foreign_namespace_is_never_served(root):
    (file,) = extent_files(root)
    foreign = root / "foreign"
    with drive(root, capacity=16 * MIB, namespace="foreign") as tier:
        assert tier.store(rows(*HELD, namespace="foreign")).error is None
    (other,) = foreign.glob("*.ext")
    shutil.copy(other, file)
    assert served(root) == (set(), set())
    maker = RowMaker("foreign", MAKER.payload_bytes)
    with drive(root, capacity=16 * MIB, namespace="foreign") as tier:
        assert tier.load(HELD).rows == {key: maker.make(key) for key in HELD}


def test_c02_rows_of_a_foreign_namespace_are_never_served(root):
    (file,) = extent_files(root)
    maker = RowMaker("foreign", MAKER.payload_bytes)
    for slot, key in enumerate(HELD[:3]):
        change(file, shape_of(file).row_offset(slot), maker.make(key))
    assert served(root) == ({*HELD[3:]}, set())


# The index.


def copy_index(root: Path, target: Path) -> None:
    target.mkdir()
    for path in (root / ".kvtier").glob("index-*"):
        shutil.copy(path, target)


def test_c32_an_old_index_with_new_extents_costs_misses_and_no_wrong_bytes(root):
    copy_index(root, root / "index-as-it-was")
    with drive(root, capacity=3 * MIB) as tier:
        for begin in range(100, 300, 10):
            assert tier.store(rows(*KEYS[begin : begin + 10])).error is None
    for path in (root / ".kvtier").glob("index-*"):
        path.unlink()
    for path in (root / "index-as-it-was").iterdir():
        shutil.copy(path, root / ".kvtier")
    right, refused = served(root)
    assert refused == set()
    assert right == set() or right < {*HELD}


@pytest.mark.parametrize(
    "index", ["lost", "empty", "noise", "torn", "other tables", "a directory's worth of zeros"]
)
def test_c32_a_lost_or_damaged_index_is_made_anew_from_the_extents(root, index, warnings):
    file = index_file(root)
    if index == "lost":
        file.unlink()
    elif index == "empty":
        file.write_bytes(b"")
    elif index == "noise":
        file.write_bytes(os.urandom(20_000))
    elif index == "torn":
        os.truncate(file, 5000)
    elif index == "other tables":
        file.unlink()
        connection = sqlite3.connect(file)
        connection.execute("CREATE TABLE slots (x)")
        connection.execute("PRAGMA user_version = 1")
        connection.commit()
        connection.close()
    else:
        file.write_bytes(bytes(65536))
    right, refused = served(root)
    assert refused == set()
    assert right == {*HELD}
    assert any("made the index anew" in text or "index" in text for text in warnings()) or index == "empty"


def test_c32_a_damaged_page_deep_in_the_index_is_met_and_mended(root):
    with drive(root, capacity=64 * MIB) as tier:
        for begin in range(0, 400, 40):
            assert tier.store(rows(*KEYS[begin : begin + 40])).error is None
    file = index_file(root)
    size = file.stat().st_size
    for page in range(2, size // 4096):
        change(file, page * 4096, os.urandom(64))
    with drive(root, capacity=64 * MIB) as tier:
        wait_until(lambda: tier.store(rows(*KEYS[:4])).error is None, "blocks can be stored again")
        wait_until(lambda: len(tier.load(KEYS).rows) > 300, "the blocks are found again")
        assert tier.load(KEYS).rows.items() <= rows(*KEYS).items()


def test_c32_an_index_that_is_lost_under_running_tiers_is_made_anew_by_one_and_followed_by_the_other(root):
    with drive(root, capacity=16 * MIB) as one, drive(root, capacity=16 * MIB) as other:
        for path in (root / ".kvtier").glob("index-*"):
            path.unlink()
        wait_until(lambda: list((root / ".kvtier").glob("index-??????.db")), "there is an index again")
        wait_until(lambda: one.load(HELD).rows == rows(*HELD), "one serves")
        wait_until(lambda: other.load(HELD).rows == rows(*HELD), "the other serves")
        # What one stores before it has noticed goes with the old index: a cache may forget.
        wait_until(
            lambda: one.store(rows(KEYS[50])).error is None and other.lookup([KEYS[50]]) == [True],
            "what one stores is found by the other",
        )
        assert other.load([KEYS[50]]).rows == rows(KEYS[50])


def test_a_rebuild_keeps_the_newest_of_two_rows_of_one_key_and_no_stale_one(root):
    tier = direct(root, capacity=16 * MIB)
    newer = MAKER.make(A, 7)
    assert tier.store_many([A], [memoryview(newer)]) == [True]
    tier.close()
    index_file(root).unlink()
    again = direct(root, capacity=16 * MIB)
    assert load(again, A) == {A: newer}
    assert load(again, B) == rows(B)
    again.close()


def test_a_table_entry_that_does_not_fit_its_row_is_no_block(root):
    (file,) = extent_files(root)
    content = file.read_bytes()
    entry = content[Shape.entry_offset(2) : Shape.entry_offset(3)]
    known = read_entry(entry)
    assert known is not None
    assert known[0] == HELD[2]
    change(file, Shape.entry_offset(3), entry)
    change(file, Shape.entry_offset(4), b"\xff" * 64)
    index_file(root).unlink()
    right, refused = served(root)
    assert refused == set()
    assert right == {*HELD} - {HELD[3], HELD[4]}


def test_an_extent_with_a_damaged_header_is_removed_when_the_index_is_made_anew(root, warnings):
    (file,) = extent_files(root)
    change(file, 20, b"\xff")
    index_file(root).unlink()
    assert served(root) == (set(), set())
    assert any("is no extent of its namespace, or damaged: removed" in text for text in warnings())


def test_an_extent_that_the_index_does_not_know_is_taken_up(root):
    copy_index(root, root / "index-as-it-was")
    tier = direct(root, capacity=16 * MIB)
    for begin in range(20, 80, 10):
        store(tier, *KEYS[begin : begin + 10])
    tier.close()
    assert len(extent_files(root)) > 1
    for path in (root / ".kvtier").glob("index-*"):
        path.unlink()
    for path in (root / "index-as-it-was").iterdir():
        shutil.copy(path, root / ".kvtier")
    again = direct(root, capacity=16 * MIB)
    found = load(again, *KEYS[:80])
    assert found.items() <= rows(*KEYS[:80]).items()
    assert len(found) >= 50  # those in extents that were new; of the known one the index decides
    again.close()


# By command.


def test_the_command_shows_a_root_and_makes_its_index_anew(root, capsys):
    assert main(["disk", "status", str(root)]) == 0
    out = capsys.readouterr().out
    assert "1 extents" in out
    assert "ns: 12 blocks of 64.0 KiB" in out
    for path in (root / ".kvtier").glob("index-*"):
        path.write_bytes(b"not an index")
    assert main(["disk", "rebuild", str(root)]) == 0
    captured = capsys.readouterr()
    assert "made the index anew from 1 extents with 12 blocks" in captured.err
    assert "ns: 12 blocks" in captured.out
    assert served(root) == ({*HELD}, set())


@pytest.mark.parametrize("action", ["status", "rebuild"])
def test_the_command_refuses_what_is_no_root(tmp_path, capsys, action):
    assert main(["disk", action, str(tmp_path / "nowhere")]) == 2
    assert "name" in capsys.readouterr().err


def test_the_command_runs_beside_an_open_tier(root, capsys):
    with drive(root, capacity=16 * MIB) as tier:
        assert main(["disk", "status", str(root)]) == 0
        assert main(["disk", "rebuild", str(root)]) == 0
        assert "12 blocks" in capsys.readouterr().out
        # What is stored before the tier has noticed goes with the old index: a cache may forget.
        wait_until(
            lambda: (
                tier.store(rows(KEYS[60])).error is None
                and tier.load([*HELD, KEYS[60]]).rows == rows(*HELD, KEYS[60])
            ),
            "blocks can be stored, and the others are there",
        )


def test_places_of_neighbouring_slots_are_neighbours():
    assert place_of(3, 5) + 1 == place_of(3, 6)
    assert place_of(3, (1 << 24) - 1) + 1 == place_of(4, 0)
