"""The disk tier's settings with one file a block: each does what its page says there too."""

import io
import logging
import os
import shutil
from pathlib import Path

import pytest

from kvtier_core.errors import TierOpenError
from kvtier_disk import DiskTier
from kvtier_testing.tiers import assert_contents
from tests.tiers import extents
from tests.tiers.disk import KEYS, ROW, A, B, C, block_file, drive, leftovers, rows
from tests.tiers.engine import TierEngine
from tests.tiers.other_users import OTHER, act_as, needs_root, public_directory


def tree(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(root)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in root.rglob("*")
    }


# Read-only.


@pytest.mark.parametrize("layout", ["files", "extents"])
def test_b10_c33_a_read_only_tier_is_given_no_stores(tmp_path, warnings, layout):
    settings = {"root": tmp_path, "layout": layout, "capacity": "64MiB"}
    with TierEngine(DiskTier, **settings) as engine:
        engine.store("w", KEYS[:3])
    before = tree(tmp_path)
    with TierEngine(DiskTier, read_only=True, **settings) as engine:
        assert engine.load("r", KEYS[:3]) == 3
        for number in range(8):
            engine.store(f"s{number}", KEYS[3 + number : 4 + number])
        assert engine.load("t", KEYS[:11]) == 11, "from the pool"
        counters = engine.manager.counters.tiers["far"]
        assert (counters.store_failed, counters.stored, counters.declined) == (0, 0, 8)
    assert tree(tmp_path).keys() == before.keys()
    assert not warnings(), "nobody is told of a failure, and no breaker opens"


def _loses_its_rights(root: Path, layout: str) -> None:
    told = io.StringIO()
    logging.getLogger("kvtier").addHandler(logging.StreamHandler(told))
    with extents.drive(root, layout=layout, capacity=16 * extents.MIB) as tier:
        held = extents.rows(*extents.KEYS[:20])
        assert not tier.store(held).missing
        folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
        for folder in folders:
            folder.chmod(0o500)
        assert tier.store(extents.rows(*extents.KEYS[100:160])).failed  # needs new files
        for key in extents.KEYS[200:210]:
            result = tier.store(extents.rows(key))
            assert (result.error, result.missing) == (None, (key,))
        assert tier.load(list(held)).rows == held
        for folder in folders:
            folder.chmod(0o700)
        if layout == "extents":
            more = extents.rows(extents.KEYS[200])
            extents.wait_until(lambda: not tier.store(more).missing, "stores work again")
            assert tier.load(list(more)).rows == more
    (text,) = [line for line in told.getvalue().splitlines() if "nothing is stored or deleted" in line]
    assert "Permission denied" in text


@needs_root
@pytest.mark.parametrize("layout", ["files", "extents"])
def test_b10_c33_a_root_that_turns_unwritable_is_told_of_once_and_given_no_stores(layout):
    with public_directory() as base:
        root = base / "root"
        root.mkdir()
        os.chown(root, OTHER, OTHER)
        root.chmod(0o700)
        act_as(OTHER, lambda: _loses_its_rights(root, layout))


def test_c33_a_read_only_tier_serves_what_it_holds_and_changes_nothing(tmp_path):
    with drive(tmp_path) as tier:
        tier.store(rows(A, B))
    os.truncate(block_file(tmp_path, B), 10)
    (tmp_path / "ns" / "tmp" / "1-2").write_bytes(b"half")
    (tmp_path / "ns" / "namespace.json").unlink()
    before = tree(tmp_path)
    with drive(tmp_path, read_only=True) as tier:
        assert_contents(tier, rows(A), absent=[B, C])
        result = tier.store(rows(A, C))
        assert result.error is None
        assert result.failed == ()
        assert tier.lookup([C]) == [False]
        tier.discard([A])
        os.truncate(block_file(tmp_path, A), 10)
        assert tier.load([A]).rows == {}
        os.truncate(block_file(tmp_path, A), ROW)
    assert tree(tmp_path).keys() == before.keys()
    assert (tmp_path / "ns" / "tmp" / "1-2").read_bytes() == b"half"


def test_c33_a_read_only_tier_with_more_than_its_capacity_removes_nothing(tmp_path):
    with drive(tmp_path) as tier:
        tier.store(rows(*KEYS[:10]))
    before = tree(tmp_path)
    with drive(tmp_path, capacity_blocks=4, read_only=True) as tier:
        assert sum(tier.lookup(KEYS[:10])) == 4
    assert tree(tmp_path) == before


def test_c33_a_read_only_tier_makes_neither_root_nor_namespace(tmp_path):
    with pytest.raises(TierOpenError, match="is not there, and the tier is configured read_only"):
        drive(tmp_path / "root", read_only=True)
    with drive(tmp_path, read_only=True) as tier:
        assert tier.lookup([A]) == [False]
    assert tree(tmp_path) == {}


# Who may write, and how much.


def test_a_root_that_everybody_may_write_to_is_refused_unless_allowed(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(
        TierOpenError, match=r"everybody may.*a directory of its own.*allow_writable_by_others"
    ):
        drive(tmp_path)
    assert tree(tmp_path) == {}
    with drive(tmp_path, allow_writable_by_others=True) as tier:
        assert tier.store(rows(A)).error is None


def test_c33_nothing_is_stored_beyond_the_free_space_floor(tmp_path):
    with drive(tmp_path) as tier:
        tier.store(rows(A))
    with drive(tmp_path, min_free="1024TiB") as tier:
        result = tier.store(rows(B))
        assert result.failed == (B,)
        assert "(min_free) stay free" in str(result.error)
        assert_contents(tier, rows(A), absent=[B])
    assert leftovers(tmp_path) == []


# What leads elsewhere, and what is another layout's.


@pytest.mark.parametrize("read_only", [False, True])
def test_c33_a_namespace_that_is_a_link_out_of_the_root_is_refused(tmp_path, read_only):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "ns").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierOpenError, match="is a link or a file, and nothing may lead out of the root"):
        drive(tmp_path / "root", read_only=read_only)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["..", "../elsewhere", "a/b", "", "x\0y"])
def test_no_namespace_leads_out_of_the_root(tmp_path, name):
    with pytest.raises(TierOpenError, match="can't be the name of a directory"):
        drive(tmp_path / "root", namespace=name)
    assert list(tmp_path.iterdir()) == []


def test_c13_a_root_with_extents_is_refused_for_files(tmp_path):
    with extents.drive(tmp_path) as tier:
        tier.store(extents.rows(extents.A))
    before = tree(tmp_path).keys()
    with pytest.raises(
        TierOpenError, match=r'holds blocks of layout = "extents".*: set another root, or layout = "ext'
    ):
        drive(tmp_path)
    assert tree(tmp_path).keys() == before


def test_c13_a_root_with_files_is_refused_for_extents_until_they_are_removed(tmp_path):
    with drive(tmp_path) as tier:
        tier.store(rows(A))
    before = tree(tmp_path).keys()
    with pytest.raises(
        TierOpenError, match=r'holds blocks of layout = "files".*: set another root, or layout = "files"'
    ):
        extents.drive(tmp_path)
    assert tree(tmp_path).keys() == before
    shutil.rmtree(tmp_path / "ns")
    with extents.drive(tmp_path) as other:
        assert other.store(extents.rows(extents.A)).error is None


# All namespaces of a root.


def blocks_by_namespace(root: Path) -> dict[str, int]:
    counts = {path.name: len(list(path.glob("??/*.kv"))) for path in root.iterdir()}
    return {name: count for name, count in counts.items() if count}


def test_b3_c13_the_capacity_holds_for_all_namespaces_of_a_root(tmp_path):
    for number in range(4):  # as weights that nobody can tell make of four starts
        with drive(tmp_path, capacity_blocks=10, namespace=f"start{number}") as tier:
            for key in KEYS[:10]:
                assert tier.store(rows(key)).error is None
                assert sum(blocks_by_namespace(tmp_path).values()) <= 10
            assert_contents(tier, rows(*KEYS[:10]))
    assert [path.name for path in tmp_path.iterdir()] == ["start3"]


def test_b3_c34_a_reset_starts_within_the_same_capacity(tmp_path):
    with drive(tmp_path, capacity_blocks=10) as tier:
        assert tier.store(rows(*KEYS[:8])).error is None
        tier.reset("later")
        assert tier.store(rows(*KEYS[:6])).error is None
        assert blocks_by_namespace(tmp_path) == {"ns": 4, "later": 6}
        assert_contents(tier, rows(*KEYS[:6]))


def test_b3_c13_of_other_namespaces_the_least_recently_used_block_leaves_first(tmp_path):
    for number, name in enumerate(["old", "new"]):
        with drive(tmp_path, capacity_blocks=10, namespace=name) as tier:
            assert tier.store(rows(*KEYS[:4])).error is None
        for path in (tmp_path / name).glob("??/*.kv"):
            os.utime(path, (1000 + number, 1000 + number))
    with drive(tmp_path, capacity_blocks=10) as tier:
        assert tier.store(rows(*KEYS[:5])).error is None
        assert blocks_by_namespace(tmp_path) == {"old": 1, "new": 4, "ns": 5}


def test_b3_c13_what_is_beyond_a_lowered_capacity_goes_at_the_start(tmp_path):
    with drive(tmp_path, capacity_blocks=10, namespace="other") as tier:
        assert tier.store(rows(*KEYS[:8])).error is None
    with drive(tmp_path, capacity_blocks=3):
        assert blocks_by_namespace(tmp_path) == {"other": 3}


def test_b3_c33_what_is_no_namespace_of_ours_neither_counts_nor_goes(tmp_path):
    (tmp_path / "theirs" / "ab").mkdir(parents=True)
    (tmp_path / "theirs" / "ab" / "abcd.kv").write_bytes(bytes(100))
    with drive(tmp_path, capacity_blocks=1, namespace="other") as tier:
        assert tier.store(rows(A)).error is None
    (tmp_path / "other" / "notes").write_text("mine")
    with drive(tmp_path, capacity_blocks=1) as tier:
        assert tier.store(rows(A)).error is None
    assert (tmp_path / "theirs" / "ab" / "abcd.kv").exists()
    assert (tmp_path / "other" / "notes").exists()
    assert blocks_by_namespace(tmp_path) == {"ns": 1, "theirs": 1}
