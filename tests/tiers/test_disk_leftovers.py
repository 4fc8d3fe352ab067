"""What killed processes and failed attempts leave in a root: it goes, and counts until then (C13, C32, C33)."""

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from kvtier_disk.extents import upkeep
from kvtier_disk.extents.extent_files import ExtentFiles
from kvtier_disk.extents.index import Index
from kvtier_disk.extents.root import Root
from tests.tiers.extents import (
    KEYS,
    MIB,
    A,
    B,
    direct,
    extent_files,
    index_file,
    load,
    outcome_of,
    program,
    rows,
    store,
)
from tests.tiers.small_disk import KINDS, run_on

CAPACITY = 16 * MIB
HELD = KEYS[:60]


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    """Every `follow` looks after what the dead have left."""
    monkeypatch.setattr(upkeep, "_REAP_EVERY_S", 0.0)


def in_home(root: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in (root / ".kvtier").iterdir()}


def killed(process) -> None:
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


# An index that is being made.

REBUILD_KILLED = """
import os, signal, sys, kvtier.main
from kvtier_disk.extents.index_files import IndexFiles
replace = IndexFiles.replace
def killed(files, fill):
    def fill_and_die(draft):
        fill(draft)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(files, fill_and_die)
IndexFiles.replace = killed
kvtier.main.main(["disk", "rebuild", sys.argv[1]])
"""


def test_c32_c13_a_rebuild_that_is_killed_costs_no_block_and_leaves_nothing(root, warnings):
    before = in_home(root)
    killed(program(REBUILD_KILLED, root))
    assert any(name.endswith(".draft") for name in in_home(root))
    tier = direct(root, capacity=CAPACITY)
    assert load(tier, *HELD) == rows(*HELD)
    tier.close()
    assert in_home(root) == before


def test_c13_an_index_that_is_in_use_no_more_and_what_was_made_for_a_while_goes(root):
    before = in_home(root)
    for name in (
        "index-000000.db",
        "index-000000.db-journal",
        "index.draft-journal",
        "namespace-7.draft",
        "probe",
    ):
        (root / ".kvtier" / name).write_bytes(bytes(100_000))
    tier = direct(root, capacity=CAPACITY)
    assert load(tier, *HELD) == rows(*HELD)
    tier.close()
    assert in_home(root) == before


NEARLY_FULL = """
import kvtier.main
from kvtier_disk.extents.root import Root
from kvtier_disk.folder import Folder
with t.drive(mnt / "r", capacity=64 * t.MIB, extent_size="1MiB") as tier:
    assert tier.store(t.rows(*t.KEYS)).error is None
for left in (0, 8, 24, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 400, 512, 800):
    disk.fill(mnt, left)
    status = kvtier.main.main(["disk", "rebuild", str(mnt / "r")])
    found = t.extent_files(mnt / "r")
    if status == 0:
        index = Root(Folder(mnt / "r"), capacity=None, max_open=8, warn=print).indexes.snapshot()
        assert len(index.extents()) == len(found), (left, len(index.extents()), len(found))
        index.database.check()
        index.database.close()
    else:
        assert not list((mnt / "r" / ".kvtier").glob("*draft*")), left
"""


@pytest.mark.parametrize("kind", KINDS)
def test_c32_c33_an_index_made_anew_on_a_nearly_full_disk_is_whole_or_none(tmp_path, kind):
    run_on(kind, tmp_path, NEARLY_FULL)


# Extents that nobody finished.

DIES_AT = """
import os, pathlib, signal, sys
from kvtier_disk.extents.extent_files import ExtentFiles
real = getattr(ExtentFiles, sys.argv[2])
def last(*arguments):
    if sys.argv[3] == "after":
        real(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
tier = t.direct(pathlib.Path(sys.argv[1]), capacity=16 * t.MIB, extent_size="1MiB")
setattr(ExtentFiles, sys.argv[2], last)
t.store(tier, *t.KEYS[100:200])
tier._upkeep._take([1])
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["make", "remove"])
def test_c13_c32_an_extent_that_a_killed_process_did_not_finish_makes_room_beside_running_ones(
    tmp_path, what, when
):
    tier = direct(tmp_path, capacity=CAPACITY, extent_size="1MiB")
    store(tier, A)
    killed(program(DIES_AT, tmp_path, what, when))
    index = tier._store.opened.index
    assert not all(row.is_ready for row in index.extents())
    tier.follow()
    assert all(row.is_ready for row in index.extents())
    assert len(index.extents()) == len(extent_files(tmp_path))
    assert store(tier, B) == [True]
    tier.close()


def test_c33_an_extent_that_a_full_disk_did_not_even_let_us_forget_counts_no_longer_than_needed(
    tmp_path, monkeypatch
):
    tier = direct(tmp_path, capacity=CAPACITY)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(ExtentFiles, "make", fail)
        full.setattr(Index, "drop_extent", fail)
        (outcome,) = store(tier, A)
        assert isinstance(outcome, OSError)
    index = tier._store.opened.index
    assert len(index.extents()) == 1
    tier.follow()
    assert not index.extents()
    assert store(tier, A) == [True]
    tier.close()


def test_c32_the_dead_are_looked_for_although_the_clock_was_put_back(tmp_path, monkeypatch):
    monkeypatch.setattr(upkeep, "_REAP_EVERY_S", 0.01)
    now = time.time()
    tier = direct(tmp_path, capacity=CAPACITY)
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now + 100_000)
        tier.follow()
    index = tier._store.opened.index
    dead = index.add_owner("1-killed", tier._store.opened.namespace)
    time.sleep(0.02)
    tier.follow()
    assert dead not in dict(index.owners())
    tier.close()


# A root that can't be looked into, or is not there.


def test_c33_a_root_that_vanishes_while_it_can_not_be_written_is_not_made_anew(root, monkeypatch):
    with monkeypatch.context() as read_only:

        def refuse(*_: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        read_only.setattr(Root, "join", refuse)
        tier = direct(root, capacity=CAPACITY)
    away = root.with_name("away")
    root.rename(away)
    root.mkdir()
    with pytest.raises(OSError, match="the root is gone, or not mounted"):
        tier.follow()
    assert not list(root.iterdir())
    root.rmdir()
    away.rename(root)
    tier.follow()
    assert load(tier, *HELD) == rows(*HELD)
    assert store(tier, *KEYS[100:104]) == [True] * 4
    tier.close()


FEW_DESCRIPTORS = """
import json, os, pathlib, sys
root = pathlib.Path(sys.argv[1])
held = t.rows(*t.KEYS[:60])
t.direct(root, capacity=16 * t.MIB).close()  # imports all there is to import
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
opened = refused = 0
for left in range(1, 20):
    for file in (root / ".kvtier").glob("index-*"):
        file.unlink()
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for fd in taken[:left]:
            os.close(fd)
    tier = None
    try:
        tier = t.direct(root, capacity=16 * t.MIB)
    except Exception as error:
        refused += 1
    finally:
        for fd in taken[left:]:
            os.close(fd)
    if tier is not None:
        opened += 1
        assert t.load(tier, *held) == held, left
        tier.close()
print(json.dumps({"opened": opened, "refused": refused}))
"""


def test_c32_an_index_made_while_files_can_not_be_opened_loses_no_block(root):
    outcome = outcome_of(program(FEW_DESCRIPTORS, root))
    assert outcome["opened"] > 0
    assert outcome["refused"] > 0


@pytest.mark.parametrize("text", ["", "deadbeef", "no number", "ff" * 40, "00000000"])
def test_c32_a_root_whose_number_is_damaged_gets_another(root, text):
    (root / ".kvtier" / "id").write_text(text)
    for _ in range(2):
        tier = direct(root, capacity=CAPACITY)
        assert load(tier, *HELD) == rows(*HELD)
        tier.close()
    assert index_file(root).name == "index-000002.db"


# Limits of the process.

SMALL_FILES = """
import json, pathlib, resource, sys
from kvtier_core.errors import TierOpenError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    tier = t.direct(pathlib.Path(sys.argv[1]), capacity=16 * t.MIB, extent_size="1MiB")
    error = t.store(tier, t.A)[0]
    tier.close()
except TierOpenError as refused:
    error = refused
print(json.dumps({"error": str(error)}))
"""


@pytest.mark.parametrize(
    ("limit", "what"),
    [
        (
            700 << 10,
            "File too large: an extent is larger than a file may be here (ulimit -f, or the file system)",
        ),
        (10 << 10, "is there a limit of what a file may take (ulimit -f)?"),
    ],
)
def test_c33_a_limit_of_the_size_of_files_is_told_with_what_to_do(tmp_path, limit, what):
    error = str(outcome_of(program(SMALL_FILES, tmp_path / "root", limit))["error"])
    assert what in error
    assert not extent_files(tmp_path)


NO_DESCRIPTORS = """
import json, os, pathlib, resource, sys
tier = t.direct(pathlib.Path(sys.argv[1]), capacity=16 * t.MIB)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    (outcome,) = tier.load_many([t.A], [memoryview(bytearray(t.ROW))])
for fd in taken:
    os.close(fd)
assert t.load(tier, t.A) == t.rows(t.A)
tier.close()
print(json.dumps({"error": str(outcome)}))
"""


def test_c33_a_lack_of_descriptors_is_told_with_what_to_do_and_goes_by(root):
    error = str(outcome_of(program(NO_DESCRIPTORS, root))["error"])
    assert "Too many open files: raise the limit of open files (ulimit -n)" in error
