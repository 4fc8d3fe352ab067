"""The disk tier on storage that can't be written: what it holds is served, stores fail, nothing else does (C33)."""

import errno
import logging
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier_core.errors import TierOpenError
from kvtier_testing.driving import PATIENCE_S
from kvtier_testing.tiers import assert_contents
from tests.tiers.disk import (
    HERE,
    KEYS,
    ROW,
    A,
    B,
    C,
    block_file,
    block_files,
    drive,
    leftovers,
    rows,
    run_program,
)
from tests.tiers.held import num_held


def fill_up(monkeypatch: pytest.MonkeyPatch, room: int = 0) -> None:
    """Let no more than *room* bytes be written."""
    real_write = os.write
    lock = threading.Lock()

    def write(fd, data):
        nonlocal room
        with lock:
            if room == 0 and len(data) > 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = real_write(fd, data[:room])
            room -= done
            return done

    monkeypatch.setattr(os, "write", write)


def forbid_changes(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Make *root* read-only, in the order in which the kernel looks at things."""

    def refuse(name: str, changes) -> None:
        real = getattr(os, name)

        def call(name, *args, **kwargs):
            directory = kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
            path = str(name if directory is None else Path(f"/proc/self/fd/{directory}").readlink() / name)
            if path.startswith(str(root)) and changes(path, *args):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(os, name, call)

    refuse("open", lambda path, flags, *_: flags & os.O_CREAT)
    refuse("mkdir", lambda path, *_: not os.path.lexists(path))
    refuse("unlink", lambda *_: True)
    refuse("rename", lambda *_: True)


# Full.


def test_k5_o2_a_full_disk_fails_the_store_and_leaves_nothing(tmp_path, monkeypatch):
    with drive(tmp_path, capacity_blocks=4) as tier:
        with monkeypatch.context() as full:
            fill_up(full, room=3000)
            result = tier.store(rows(A, B))
            assert set(result.failed) == {A, B}
            assert result.error is not None
            assert "No space left on device" in result.error
        assert block_files(tmp_path) == leftovers(tmp_path) == []
        assert num_held(tier) == 0
        assert tier.lookup([A, B]) == [False, False]
        assert tier.store(rows(A, B)).error is None
        assert_contents(tier, rows(A, B))


@pytest.mark.parametrize("described", [True, False])
def test_c33_k5_o2_a_full_disk_is_opened_and_serves_what_it_holds(tmp_path, monkeypatch, caplog, described):
    with drive(tmp_path) as tier:
        tier.store(rows(A))
    if not described:
        (tmp_path / "ns" / "namespace.json").unlink()
    with monkeypatch.context() as full:
        fill_up(full)
        tier = drive(tmp_path)
        assert_contents(tier, rows(A), absent=[B])
        result = tier.store(rows(B))
        assert result.failed == (B,)
        assert "No space left on device" in str(result.error)
        assert leftovers(tmp_path) == []
    with tier:
        assert tier.store(rows(B)).error is None
        assert_contents(tier, rows(A, B))
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    warnings = [text for text in warnings if "a store job failed" not in text]  # the core's own word of it
    assert len(warnings) == (0 if described else 1)
    assert all("can't write namespace.json" in warning for warning in warnings)


LIMITED = """
import resource, signal, sys
from pathlib import Path
from kvtier_testing.tiers import assert_contents
from tests.tiers import disk as t
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with t.drive(Path(sys.argv[1])) as tier:
    resource.setrlimit(resource.RLIMIT_FSIZE, (t.ROW // 2, resource.RLIM_INFINITY))
    result = tier.store(t.rows(t.A))
    assert result.failed == (t.A,), result
    assert "File too large" in result.error, result
    assert t.block_files(Path(sys.argv[1])) == t.leftovers(Path(sys.argv[1])) == []
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert tier.store(t.rows(t.A)).error is None
    assert_contents(tier, t.rows(t.A))
"""


def test_k5_o2_c33_a_limit_of_the_kernel_fails_the_store_and_leaves_nothing(tmp_path):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path],
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# Read-only.


def test_c33_a_read_only_root_without_the_namespace_is_refused(tmp_path, monkeypatch):
    forbid_changes(monkeypatch, tmp_path)
    with pytest.raises(TierOpenError, match="Read-only file system; set root to a directory on a writable"):
        drive(tmp_path)


@pytest.mark.parametrize("missing", [[], ["namespace.json"], ["tmp"]])
def test_b10_c33_a_read_only_root_serves_what_it_holds_and_says_so_once(
    tmp_path, monkeypatch, caplog, missing
):
    with drive(tmp_path) as tier:
        tier.store(rows(A, B))
    for name in missing:
        path = tmp_path / "ns" / name
        path.rmdir() if path.is_dir() else path.unlink()
    with monkeypatch.context() as read_only:
        forbid_changes(read_only, tmp_path)
        tier = drive(tmp_path)
        (warning,) = [record.getMessage() for record in caplog.records]
        assert f"'disk' (kvtier-disk): can't write in {tmp_path / 'ns'}: Read-only file system" in warning
        assert "nothing is stored or deleted. To store, allow writing, and start again" in warning
        assert_contents(tier, rows(A, B), absent=[C])
        for _ in range(3):
            result = tier.store(rows(C))
            assert (result.error, result.missing) == (None, (C,))
        tier.shutdown()
    assert len(caplog.records) == 1
    with drive(tmp_path) as tier:
        assert not tier.store(rows(C)).missing
        assert_contents(tier, rows(A, B, C))


def test_c33_leftovers_and_damage_on_a_read_only_root_stay_and_are_not_served(tmp_path, monkeypatch):
    with drive(tmp_path) as tier:
        tier.store(rows(A, B))
    os.truncate(block_file(tmp_path, A), 10)
    (tmp_path / "ns" / "tmp" / "1-2").write_bytes(b"half")
    (tmp_path / "ns" / "ff").symlink_to(tmp_path)
    with monkeypatch.context() as read_only:
        forbid_changes(read_only, tmp_path)
        with drive(tmp_path) as tier:
            os.truncate(block_file(tmp_path, B), 10)
            assert tier.load([A]).result.missing == (A,)
            assert tier.load([B]).rows == {B: bytes(ROW)}
    assert len(block_files(tmp_path)) == 2
    with drive(tmp_path) as tier:
        assert_contents(tier, {}, absent=[A, B])
        assert block_files(tmp_path) == leftovers(tmp_path) == []


def test_c33_a_read_only_root_that_holds_more_than_the_capacity_is_opened(tmp_path, monkeypatch, caplog):
    keys = KEYS[:10]
    with drive(tmp_path) as tier:
        tier.store(rows(*keys))
    for age, key in enumerate(keys):
        os.utime(block_file(tmp_path, key), (1000 + 120 * age, 1000 + 120 * age))  # use is told to a minute
    with monkeypatch.context() as read_only:
        forbid_changes(read_only, tmp_path)
        with drive(tmp_path, capacity_blocks=4) as tier:
            (record,) = caplog.records
            assert "nothing is stored or deleted" in record.getMessage()
            assert_contents(tier, rows(*keys[6:]), absent=keys[:6])
    with drive(tmp_path, capacity_blocks=4) as tier:
        assert_contents(tier, rows(*keys[6:]), absent=keys[:6])
    assert len(block_files(tmp_path)) == 4


# Both, for real.

_OWN_MOUNTS = ["unshare", "--mount", "--map-root-user"]


def test_c33_k5_o2_a_file_system_that_is_full_then_read_only_then_neither(tmp_path):
    try:
        subprocess.run(
            [*_OWN_MOUNTS, "mount", "-t", "tmpfs", "none", tmp_path], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    done = run_program("full_disk.py", tmp_path, under=_OWN_MOUNTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["full: served", "read-only: served", "writable: stored"]
