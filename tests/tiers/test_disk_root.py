"""What lies below a root, whose it is, and that index and files agree about it (C13, C32, C33)."""

import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.main import main
from kvtier_core.errors import TierOpenError
from kvtier_disk import DiskTier
from kvtier_disk.extents import upkeep
from kvtier_disk.extents.extent_files import ExtentFiles
from kvtier_disk.extents.index import Index
from tests.tiers.extents import (
    KEYS,
    MIB,
    A,
    B,
    direct,
    drive,
    extent_files,
    index_file,
    load,
    outcome_of,
    program,
    rows,
    settings,
    store,
    used_bytes,
)

CAPACITY = 24 * MIB


def small(root: Path, namespace: str = "ns", *, read_only: bool = False) -> DiskTier:
    """A tier with extents of 15 blocks."""
    return direct(root, capacity=CAPACITY, namespace=namespace, extent_size="1MiB", read_only=read_only)


def fill(root: Path, namespace: str, count: int) -> None:
    tier = small(root, namespace)
    assert store(tier, *KEYS[:count], namespace=namespace) == [True] * count
    tier.close()


def numbers(root: Path) -> list[str]:
    return [path.name for path in extent_files(root)]


# A number stands for one extent.


def test_c13_k3_o2_who_has_not_heard_of_a_new_index_makes_no_extent_by_the_old_one(tmp_path):
    one, other = small(tmp_path, "one"), small(tmp_path, "other")
    store(one, *KEYS[:20], namespace="one")
    store(other, *KEYS[:20], namespace="other")
    assert main(["disk", "rebuild", str(tmp_path)]) == 0
    one.follow()
    assert store(one, *KEYS[20:200], namespace="one") == [True] * 180
    failed = [outcome for outcome in store(other, *KEYS[20:300], namespace="other") if outcome is not True]
    assert failed
    assert {outcome.errno for outcome in failed} == {errno.ESTALE}
    assert used_bytes(tmp_path) <= CAPACITY
    other.follow()
    one.follow()
    assert store(other, *KEYS[20:300], namespace="other") == [True] * 280
    assert used_bytes(tmp_path) <= CAPACITY
    assert len(set(numbers(tmp_path))) == len(numbers(tmp_path))
    one.close()
    other.close()


@pytest.fixture
def doubled(tmp_path) -> Path:
    """A root with 8 extents, among them two of the same number in two namespaces; the index knows those of ``ns``."""
    root = tmp_path / "root"
    fill(root, "ns", 100)
    fill(tmp_path / "elsewhere", "moved", 15)
    (tmp_path / "elsewhere" / "moved").rename(root / "moved")
    assert len(numbers(root)) == len(set(numbers(root))) + 1
    return root


def test_c13_of_two_extents_with_one_number_the_one_that_the_index_knows_stays(doubled, warnings):
    tier = small(doubled)
    assert len(numbers(doubled)) == len(set(numbers(doubled)))
    assert [path.parent.name for path in extent_files(doubled)] == ["ns"] * len(numbers(doubled))
    assert load(tier, *KEYS[:100]) == rows(*KEYS[:100])
    assert any("moved/0000000001.ext has another extent's number: removed" in text for text in warnings())
    tier.close()


def test_c13_of_two_extents_with_one_number_the_newer_stays_when_the_index_is_made_anew(doubled):
    index_file(doubled).unlink()
    moved = doubled / "moved" / "0000000001.ext"
    os.utime(moved, (moved.stat().st_mtime + 100,) * 2)
    tier = small(doubled, "moved")
    assert load(tier, *KEYS[:15]) == rows(*KEYS[:15], namespace="moved")
    assert len(numbers(doubled)) == len(set(numbers(doubled)))
    tier.close()


# An index is one root's.


@pytest.fixture
def foreign_index(tmp_path) -> Path:
    """The index of another root, whose extents have the numbers of this one's."""
    fill(tmp_path / "other root", "theirs", 100)
    return index_file(tmp_path / "other root")


def assert_whole(tier: DiskTier, root: Path) -> None:
    """Everything is there, and the capacity holds."""
    assert load(tier, *KEYS[:100]) == rows(*KEYS[:100])
    assert store(tier, *KEYS[100:399]) == [True] * 299
    assert used_bytes(root) <= CAPACITY
    assert {path.parent.name for path in extent_files(root)} == {"ns"}
    tier.close()


def test_c32_the_index_of_another_root_is_made_anew_at_once(tmp_path, foreign_index, warnings):
    root = tmp_path / "root"
    fill(root, "ns", 100)
    shutil.copy(foreign_index, index_file(root))
    assert_whole(small(root), root)
    assert any(
        "because the index is damaged (it is the index of another root)" in text for text in warnings()
    )


def test_c32_the_index_of_another_root_under_a_running_tier_is_made_anew_at_once(tmp_path, foreign_index):
    root = tmp_path / "root"
    tier = small(root)
    store(tier, *KEYS[:100])
    shutil.copy(foreign_index, tmp_path / "copy")
    (tmp_path / "copy").replace(index_file(root))
    tier.follow()
    assert_whole(tier, root)


def test_c32_with_all_that_belongs_to_the_index_of_another_root_the_extents_are_entered_at_once(
    tmp_path, foreign_index
):
    root = tmp_path / "root"
    fill(root, "ns", 100)
    shutil.rmtree(root / ".kvtier")
    shutil.copytree(foreign_index.parent, root / ".kvtier")
    assert_whole(small(root), root)


def test_c30_who_has_not_heard_that_another_root_is_in_the_place_touches_nothing_of_it(tmp_path):
    root, away = tmp_path / "root", tmp_path / "away"
    fill(root, "ns", 60)
    tier = small(root)
    root.rename(away)
    theirs = small(root)
    assert store(theirs, *KEYS[100:160]) == [True] * 60
    with pytest.raises(OSError, match="was moved away and another one is in its place"):
        load(tier, *KEYS[:60])
    (outcome,) = store(tier, KEYS[200])
    assert isinstance(outcome, OSError)
    assert outcome.errno == errno.ESTALE
    assert load(theirs, *KEYS[100:160]) == rows(*KEYS[100:160])
    tier.follow()
    assert load(tier, *KEYS[100:160]) == rows(*KEYS[100:160])
    tier.close()
    theirs.close()
    moved = small(away)
    assert load(moved, *KEYS[:60]) == rows(*KEYS[:60])
    moved.close()


def test_c32_a_root_that_is_copied_whole_keeps_its_index(tmp_path, warnings):
    fill(tmp_path / "root", "ns", 100)
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    assert_whole(small(tmp_path / "copy"), tmp_path / "copy")
    assert warnings() == []


@pytest.mark.parametrize("content", [None, b"", b"noise\xff"])
def test_c32_a_root_that_lost_its_number_keeps_its_blocks(tmp_path, content):
    fill(tmp_path, "ns", 100)
    number = tmp_path / ".kvtier" / "id"
    number.unlink() if content is None else number.write_bytes(content)
    small(tmp_path).close()
    before = index_file(tmp_path)
    tier = small(tmp_path)
    assert index_file(tmp_path) == before
    assert_whole(tier, tmp_path)


def test_c33_somebodys_file_in_the_place_of_the_next_extent_stays_and_stops_no_store(tmp_path):
    tier = small(tmp_path)
    theirs = tmp_path / "ns" / "0000000001.ext"
    theirs.write_bytes(b"precious")
    assert store(tier, A, B) == [True, True]
    assert theirs.read_bytes() == b"precious"
    tier.close()


# Namespaces that come and go.


def test_c30_a_namespace_directory_that_is_deleted_under_a_running_tier_is_made_again(tmp_path, warnings):
    tier = small(tmp_path)
    store(tier, *KEYS[:50])
    shutil.rmtree(tmp_path / "ns")
    tier.follow()
    assert tier.contains(KEYS[:50]) == [False] * 50
    assert store(tier, *KEYS[:50]) == [True] * 50
    assert load(tier, *KEYS[:50]) == rows(*KEYS[:50])
    assert (tmp_path / "ns" / "namespace.json").exists()
    assert any("was gone, with all blocks in it: made again" in text for text in warnings())
    tier.close()


def test_c30_nobody_removes_a_namespace_that_another_process_is_joining(tmp_path, monkeypatch):
    monkeypatch.setattr(upkeep, "_REAP_EVERY_S", 0.0)
    one = small(tmp_path, "one")
    small(tmp_path, "other").close()  # leaves a namespace that holds nothing
    real = Index.add_owner
    followers = []

    def meanwhile(index: Index, lock: str, namespace: int) -> int:
        follower = threading.Thread(target=one.follow)
        follower.start()
        follower.join(0.3)  # long enough to do harm, were it not kept waiting
        followers.append(follower)
        return real(index, lock, namespace)

    monkeypatch.setattr(Index, "add_owner", meanwhile)
    other = small(tmp_path, "other")
    for follower in followers:
        follower.join()
    assert store(other, *KEYS[:30], namespace="other") == [True] * 30
    assert (tmp_path / "other" / "namespace.json").exists()
    other.close()
    one.close()


def test_the_directory_of_a_namespace_that_gave_everything_up_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(upkeep, "_REAP_EVERY_S", 0.0)
    fill(tmp_path, "old", 10)
    later = time.time() + 1000
    monkeypatch.setattr(time, "time", lambda: later)
    tier = direct(tmp_path, capacity=3 * MIB)
    for begin in range(0, 100, 10):
        store(tier, *KEYS[begin : begin + 10])
    tier.follow()
    assert not (tmp_path / "old").exists()
    tier.close()


# What is not kvtier's.


@pytest.fixture
def foreign(tmp_path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "0123456789.ext").write_text("my own file, no extent")
    (tmp_path / "docs" / "0123456780.ext").symlink_to("0123456789.ext")
    return tmp_path


def below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_c33_a_rebuild_refuses_what_is_no_root_and_writes_nothing(foreign, capsys):
    before = below(foreign)
    assert main(["disk", "rebuild", str(foreign)]) == 2
    assert "holds neither an index nor an extent of a disk tier: name its root" in capsys.readouterr().err
    assert below(foreign) == before


@pytest.mark.parametrize("action", ["status", "rebuild"])
def test_a_root_that_is_not_there_is_said_to_be_missing(tmp_path, capsys, action):
    missing = tmp_path / "missing"
    assert main(["disk", action, str(missing)]) == 2
    assert f"there is no directory {missing}: name the tier's root" in capsys.readouterr().err
    assert not missing.exists()


def test_c33_files_without_the_header_of_an_extent_are_never_removed(foreign, warnings):
    fill(foreign, "ns", 20)
    assert main(["disk", "rebuild", str(foreign)]) == 0
    index_file(foreign).unlink()
    tier = small(foreign)
    assert load(tier, *KEYS[:20]) == rows(*KEYS[:20])
    tier.close()
    assert (foreign / "docs" / "0123456789.ext").read_text() == "my own file, no extent"
    assert (foreign / "docs" / "0123456780.ext").is_symlink()
    assert any(
        "0123456789.ext is no extent by its header, or can't be read: left alone" in text
        for text in warnings()
    )


def test_a_rebuild_takes_a_root_whose_index_is_lost_with_its_directory(tmp_path, capsys):
    fill(tmp_path, "ns", 20)
    shutil.rmtree(tmp_path / ".kvtier")
    assert main(["disk", "rebuild", str(tmp_path)]) == 0
    assert "ns: 20 blocks" in capsys.readouterr().out


_AS_ANOTHER_USER = """
import os, pathlib, sys
t.direct(pathlib.Path(sys.argv[2])).close()  # imports what that user may not read
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
tier = t.direct(pathlib.Path(sys.argv[1]))
assert t.store(tier, t.A) == [True]
assert t.load(tier, t.A) == t.rows(t.A)
tier.close()
print("{}")
"""


@pytest.fixture
def public_root() -> Iterator[Path]:
    """A directory that an unprivileged user can use."""
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    root = base / "root"
    root.mkdir()
    if os.geteuid() == 0:
        os.chown(root, 65534, 65534)
    yield root
    shutil.rmtree(base)


@pytest.mark.parametrize("name", ["lost+found", "private"])
def test_c33_directories_that_can_not_be_read_stop_no_start(public_root, tmp_path, name):
    (public_root / name).mkdir(mode=0o700 if os.geteuid() == 0 else 0)
    outcome_of(program(_AS_ANOTHER_USER, public_root, tmp_path))
    (public_root / name).chmod(0o700)


# What is said, and where it looks.


def test_the_command_shows_no_more_than_the_root_takes(tmp_path, capsys):
    tier = direct(tmp_path, capacity=8 * MIB)
    store(tier, *KEYS[:200])
    assert main(["disk", "status", str(tmp_path)]) == 0
    shown = float(capsys.readouterr().out.split(": ")[1].split(" MiB")[0])
    tier.close()
    assert 0.9 * used_bytes(tmp_path) <= shown * MIB <= 8 * MIB


def test_c30_a_slot_that_was_taken_away_while_it_was_written_is_no_death_notice(tmp_path, monkeypatch):
    tier = small(tmp_path)
    opened = tier._store.opened
    real = ExtentFiles.sync

    def sync(files: ExtentFiles, extent: int) -> None:
        real(files, extent)
        opened.index.empty_extent(extent, None, only_idle=False)

    monkeypatch.setattr(ExtentFiles, "sync", sync)
    (outcome,) = store(tier, A)
    assert isinstance(outcome, OSError)
    assert outcome.errno == errno.ESTALE
    assert "taken away while it was written: its extent went, the index was made anew, or" in str(outcome)
    tier.close()


def test_c33_a_read_only_tier_leaves_nothing_in_a_root_that_nobody_writes_to(tmp_path):
    fill(tmp_path, "ns", 20)
    before = below(tmp_path)
    tier = small(tmp_path, read_only=True)
    assert load(tier, *KEYS[:20]) == rows(*KEYS[:20])
    assert below(tmp_path) == before
    tier.close()
    assert below(tmp_path) == before


def test_c33_a_read_only_tier_that_was_there_first_finds_what_a_writer_stores(tmp_path):
    fill(tmp_path, "ns", 20)
    reader = small(tmp_path, read_only=True)
    fill_more = (
        "t.store(t.direct(__import__('pathlib').Path(__import__('sys').argv[1])), t.KEYS[50]); print('{}')"
    )
    outcome_of(program(fill_more, tmp_path))
    reader.follow()
    assert load(reader, *KEYS[:20], KEYS[50]) == rows(*KEYS[:20], KEYS[50])
    reader.close()


@pytest.mark.parametrize("layout", ["extents", "files"])
def test_c33_a_relative_root_stays_where_it_is_when_the_process_goes_elsewhere(tmp_path, monkeypatch, layout):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with drive(Path("root"), layout=layout) as tier:
        assert tier.store(rows(*KEYS[:20])).error is None
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert tier.store(rows(*KEYS[20:60])).error is None
        assert tier.load(KEYS[:60]).rows == rows(*KEYS[:60])
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_c54_a_root_that_no_file_system_can_name_is_refused():
    with pytest.raises(ValueError, match="holds a NUL character"):
        settings(Path("a\0b"))


# Links.


@pytest.fixture
def linked(tmp_path) -> Path:
    """A root whose namespace ``ns`` was moved to another disk, with a link in its place."""
    root = tmp_path / "root"
    fill(root, "ns", 50)
    (root / "ns").rename(tmp_path / "other disk")
    (root / "ns").symlink_to(tmp_path / "other disk")
    return root


@pytest.mark.parametrize("read_only", [False, True])
def test_c33_a_namespace_that_is_a_link_out_of_the_root_is_refused(linked, read_only):
    before = below(linked.parent / "other disk")
    with pytest.raises(
        TierOpenError, match=r"ns' is a link or a file, and nothing may lead out of the root: put"
    ):
        small(linked, read_only=read_only)
    assert below(linked.parent / "other disk") == before


def test_c33_nothing_is_removed_through_the_link_of_another_namespace(linked, warnings):
    before = {path: path.stat().st_size for path in (linked.parent / "other disk").iterdir()}
    tier = small(linked, "mine")
    assert store(tier, *KEYS[:200], namespace="mine") == [True] * 200
    tier.close()
    assert {path: path.stat().st_size for path in (linked.parent / "other disk").iterdir()} == before
    assert any("is a link: not followed, and not used" in text for text in warnings())


def test_c33_a_link_that_comes_to_stand_in_a_running_namespaces_place_is_not_followed(tmp_path):
    root = tmp_path / "root"
    tier = small(root)
    store(tier, *KEYS[:50])
    (root / "ns").rename(tmp_path / "other disk")
    (root / "ns").symlink_to(tmp_path / "other disk")
    before = below(tmp_path / "other disk")
    failed = [outcome for outcome in store(tier, *KEYS[50:200]) if outcome is not True]
    assert {outcome.errno for outcome in failed} == {errno.ENOTDIR}
    assert below(tmp_path / "other disk") == before
    tier.close()


def test_c33_a_link_in_the_place_of_the_index_directory_is_refused(tmp_path):
    root = tmp_path / "root"
    fill(root, "ns", 5)
    (root / ".kvtier").rename(tmp_path / "elsewhere")
    (root / ".kvtier").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierOpenError, match="nothing may lead out of the root"):
        small(root)
