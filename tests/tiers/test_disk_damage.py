"""The disk tier meets what it never wrote: it reads no such thing, waits for none, and goes on (C03, C32, C33)."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_testing.tiers import assert_contents
from tests.tiers.disk import KEYS, MAKER, ROW, A, B, block_file, block_files, direct, drive, leftovers, rows
from tests.tiers.held import num_held

# Files that are no whole blocks.


@pytest.mark.parametrize("size", [0, 1, ROW - 1, ROW + 1, 2 * ROW])
def test_b9_c03_k6_o1_a_file_of_another_size_counts_as_damaged_and_goes(tmp_path, warnings, size):
    with drive(tmp_path) as tier:
        tier.store(rows(A, B))
        damaged = block_file(tmp_path, A)
        os.truncate(damaged, size)
        loaded = tier.load([A, B])
        assert loaded.result.error is None
        assert loaded.result.missing == ()
        assert loaded.rows == {A: bytes(ROW), **rows(B)}
        assert not MAKER.proves(A, loaded.rows[A])
        assert not damaged.exists()
        (warning,) = warnings()
        assert f"'disk' (kvtier-disk): {damaged} has {size} bytes and not {ROW}: removed" in warning
        tier.discard([A])  # as the core does
        assert tier.lookup([A, B]) == [False, True]
        assert tier.store(rows(A)).error is None
        assert_contents(tier, rows(A, B))


def test_b20_c03_any_number_of_truncated_files_fails_no_load_and_fills_no_log(tmp_path, warnings):
    with drive(tmp_path) as tier:
        tier.store(rows(*KEYS))
        for file in block_files(tmp_path):
            os.truncate(file, 100)
        for key in KEYS:
            assert tier.load([key]).rows == {key: bytes(ROW)}
        assert block_files(tmp_path) == []
        (first,) = warnings()
        assert "has 100 bytes" in first
    _, summary = warnings()
    assert f"{len(KEYS)} files in the places of blocks were no whole blocks" in summary


def test_c03_a_file_cut_while_it_is_read_is_a_miss(tmp_path, monkeypatch, warnings):
    with drive(tmp_path) as tier:
        tier.store(rows(A))
        real_preadv = os.preadv
        monkeypatch.setattr(
            os,
            "preadv",
            lambda fd, into, offset: real_preadv(fd, [into[0][:700]], offset) if offset < 2000 else 0,
        )
        result = tier.load([A]).result
        assert result.missing == ()
        assert result.error is None
        assert block_files(tmp_path) == []
        (warning,) = warnings()
        assert f"ends after 2100 bytes of {ROW}: removed" in warning


@pytest.mark.parametrize("size", [0, ROW - 1, ROW + 1])
def test_k2_a_restart_removes_files_of_another_size(tmp_path, size):
    with drive(tmp_path) as tier:
        tier.store(rows(A, B))
    damaged = block_file(tmp_path, A)
    os.truncate(damaged, size)
    assert direct(tmp_path).contains([A, B]) == [False, True]
    with drive(tmp_path) as tier:
        assert_contents(tier, rows(B), absent=[A])
        assert not damaged.exists()


def test_c32_a_block_under_a_name_where_it_is_not_looked_for_is_left_alone(tmp_path):
    with drive(tmp_path) as tier:
        tier.store(rows(A))
    stray = tmp_path / "ns" / "00" / block_file(tmp_path, A).name
    stray.parent.mkdir()
    block_file(tmp_path, A).rename(stray)
    with drive(tmp_path) as tier:
        assert_contents(tier, {}, absent=[A])
        assert num_held(tier) == 0
    assert stray.exists()


# Things that are no files, in a block's place.


def make_directory(path: Path) -> None:
    path.mkdir()


def make_full_directory(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("precious")


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{here}/{path.name}")  # the path alone may be longer than an address
    finally:
        os.close(here)


def root_of(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name == "ns").parent


def make_link(path: Path) -> None:
    """To a regular file of the right size, which is not ours."""
    elsewhere = root_of(path) / "elsewhere"
    elsewhere.write_bytes(bytes(ROW))
    path.symlink_to(elsewhere)


def make_dangling_link(path: Path) -> None:
    path.symlink_to(root_of(path) / "nowhere")


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_device_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


STRANGERS = [
    make_directory,
    make_full_directory,
    make_fifo,
    make_socket,
    make_link,
    make_dangling_link,
    make_loop,
    make_device_link,
]


def replace(path: Path, make: Callable[[Path], None]) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    make(path)


def assert_nothing_of_others_is_lost(root: Path, make: Callable[[Path], None]) -> None:
    """What *make* put somewhere that is not ours is somewhere still."""
    if make is make_full_directory:
        assert [file.read_text() for file in root.rglob("mine")] == ["precious"]
    if make is make_link:
        assert (root / "elsewhere").read_bytes() == bytes(ROW)
    if make is make_linked_folder:
        assert (root / "folder" / f"{A.hex()}.kv").read_text() == "precious"


@pytest.mark.parametrize("make", STRANGERS)
def test_c32_what_stands_in_a_blocks_place_is_a_miss_and_makes_room(tmp_path, warnings, make):
    with drive(tmp_path) as tier:
        tier.store(rows(A, B))
        replace(block_file(tmp_path, A), make)
        assert direct(tmp_path).contains([A, B]) == [False, True]
        loaded = tier.load([A, B])
        assert loaded.result.missing == (A,)
        assert loaded.result.error is None
        (warning,) = warnings()
        assert f"{block_file(tmp_path, A)} is no regular file" in warning
        assert tier.store(rows(A)).error is None
        assert_contents(tier, rows(A, B))
    assert_nothing_of_others_is_lost(tmp_path, make)


@pytest.mark.parametrize("make", STRANGERS)
def test_c32_what_stands_in_a_blocks_place_stops_no_start(tmp_path, warnings, make):
    with drive(tmp_path) as tier:
        tier.store(rows(A, B))
    replace(block_file(tmp_path, A), make)
    with drive(tmp_path) as tier:
        assert_contents(tier, rows(B), absent=[A])
        (warning,) = warnings()
        assert f"{block_file(tmp_path, A)} is no regular file" in warning
        assert tier.store(rows(A)).error is None
        assert_contents(tier, rows(A, B))
    with drive(tmp_path) as tier:
        assert_contents(tier, rows(A, B))
    assert_nothing_of_others_is_lost(tmp_path, make)


@pytest.mark.parametrize("make", STRANGERS)
def test_c32_a_block_replaces_what_came_to_stand_in_its_place(tmp_path, make):
    with drive(tmp_path) as tier:
        tier.store(rows(A))
        tier.discard([A])
        assert tier.store({}).error is None
        make_way = block_file(tmp_path, B)
        make_way.parent.mkdir(exist_ok=True)
        make(make_way)
        assert tier.store(rows(B)).error is None
        assert tier.load([B]).rows == rows(B)
    assert_nothing_of_others_is_lost(tmp_path, make)


@pytest.mark.parametrize("make", STRANGERS)
def test_c32_a_delete_takes_away_what_stands_in_a_blocks_place(tmp_path, make):
    with drive(tmp_path, capacity_blocks=1) as tier:
        tier.store(rows(A))
        replace(block_file(tmp_path, A), make)
        assert tier.store(rows(B)).error is None
        assert not os.path.lexists(block_file(tmp_path, A))
        assert_contents(tier, rows(B), absent=[A])
    assert_nothing_of_others_is_lost(tmp_path, make)


# Things that are no directories, in a folder's place.

NO_FOLDERS = [make_fifo, make_socket, make_link, make_dangling_link, Path.touch]


def make_linked_folder(path: Path) -> None:
    """To a directory that is not ours; it holds what looks like a damaged block."""
    elsewhere = root_of(path) / "folder"
    elsewhere.mkdir()
    (elsewhere / f"{A.hex()}.kv").write_text("precious")
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("make", [*NO_FOLDERS, make_loop, make_linked_folder])
def test_c32_what_stands_in_a_folders_place_stops_no_start(tmp_path, warnings, make):
    with drive(tmp_path) as tier:
        tier.store(rows(A))
    folder = block_file(tmp_path, A).parent
    replace(folder, make)
    with drive(tmp_path) as tier:
        assert_contents(tier, {}, absent=[A])
        (warning,) = warnings()
        assert f"{folder} is no directory: removed" in warning
        assert tier.store(rows(A)).error is None
        assert_contents(tier, rows(A))
    assert folder.is_dir()
    assert not folder.is_symlink()
    assert_nothing_of_others_is_lost(tmp_path, make)


@pytest.mark.parametrize("make", NO_FOLDERS)
def test_c32_what_stands_in_a_folders_place_is_a_miss_and_makes_room(tmp_path, make):
    with drive(tmp_path, capacity_blocks=1) as tier:
        tier.store(rows(A))
        replace(block_file(tmp_path, A).parent, make)
        assert direct(tmp_path).contains([A]) == [False]
        assert tier.load([A]).result.missing == (A,)
        assert tier.store(rows(A)).error is None
        assert_contents(tier, rows(A))
        replace(block_file(tmp_path, A).parent, make)
        assert tier.store(rows(B)).error is None
        assert_contents(tier, rows(B), absent=[A])


@pytest.mark.parametrize("make", [*NO_FOLDERS, make_loop, make_linked_folder])
def test_c32_what_stands_in_the_place_of_tmp_is_replaced_at_the_start(tmp_path, make):
    with drive(tmp_path) as tier:
        tier.store(rows(A))
    tmp = tmp_path / "ns" / "tmp"
    replace(tmp, make)
    with drive(tmp_path) as tier:
        assert tier.store(rows(B)).error is None
        assert_contents(tier, rows(A, B))
    assert tmp.is_dir()
    assert not tmp.is_symlink()
    assert_nothing_of_others_is_lost(tmp_path, make)


@pytest.mark.parametrize("make", [*NO_FOLDERS, lambda _: None])
def test_c32_what_comes_to_stand_in_the_place_of_tmp_is_replaced(tmp_path, make):
    with drive(tmp_path) as tier:
        replace(tmp_path / "ns" / "tmp", make)
        assert tier.store(rows(A)).error is None
        assert_contents(tier, rows(A))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("make", STRANGERS)
def test_c32_what_stands_among_the_temporary_files_goes_or_is_ignored(tmp_path, warnings, make):
    drive(tmp_path).shutdown()
    stranger = tmp_path / "ns" / "tmp" / "1-2"
    make(stranger)
    with drive(tmp_path) as tier:
        assert tier.store(rows(A)).error is None
        assert_contents(tier, rows(A))
    if stranger.is_dir():
        (warning,) = warnings()
        assert f"{stranger} is a directory and no work of kvtier's: ignored" in warning
    else:
        assert leftovers(tmp_path) == []
        assert warnings() == []
    assert_nothing_of_others_is_lost(tmp_path, make)


# The description.


def description(root: Path) -> Path:
    return root / "ns" / "namespace.json"


def test_k7_o1_a_restart_does_not_write_the_description_again(tmp_path):
    drive(tmp_path).shutdown()
    before = description(tmp_path).stat()
    drive(tmp_path).shutdown()
    after = description(tmp_path).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize(
    "make", [*STRANGERS, Path.touch, lambda path: path.write_bytes(b"\xff{"), lambda _: None]
)
def test_c02_c32_a_description_that_is_missing_or_wrong_is_written_again(tmp_path, make):
    drive(tmp_path).shutdown()
    replace(description(tmp_path), make)
    with drive(tmp_path) as tier:
        assert tier.store(rows(A)).error is None
        assert_contents(tier, rows(A))
    assert json.loads(description(tmp_path).read_text()) == {"model": "kit", "namespace": "ns"}
    assert not description(tmp_path).is_symlink()
    assert_nothing_of_others_is_lost(tmp_path, make)
