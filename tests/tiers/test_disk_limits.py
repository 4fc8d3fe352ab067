"""What machine and process have little of: descriptors, inodes, file systems that sync (C30)."""

import errno
import os

import pytest

from kvtier_core.errors import TierOpenError
from tests.tiers.extents import A, drive, outcome_of, program, rows
from tests.tiers.small_disk import run_on

_FEW_DESCRIPTORS = """
import json, os, pathlib, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
before = len(os.listdir("/proc/self/fd"))
keys = t.similar_keys(700)
with t.drive(pathlib.Path(sys.argv[1]), capacity=400 * t.MIB, extent_size="1MiB") as tier:
    for begin in range(0, 700, 50):
        assert tier.store(t.rows(*keys[begin : begin + 50])).error is None
    assert tier.load(keys).rows == t.rows(*keys)
    extents = len(t.extent_files(pathlib.Path(sys.argv[1])))
    open_now = len(os.listdir("/proc/self/fd")) - before
    sockets = [socket.socket() for _ in range(150)]
print(json.dumps({"extents": extents, "open": open_now}))
"""


def test_r6_c30_extents_take_no_more_than_a_quarter_of_the_descriptors(tmp_path):
    process = program(_FEW_DESCRIPTORS, tmp_path)
    found = outcome_of(process)
    assert found["extents"] > 40
    assert found["open"] <= 64 + 10  # the index, signs of life, pipes of threads


_SAYS_SO = """
import logging, pathlib, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), 4096))
logging.basicConfig(stream=sys.stdout, format="%(message)s")
t.direct(pathlib.Path(sys.argv[1])).close()
"""


@pytest.mark.parametrize(("limit", "said"), [(256, "at most 32 extents stay open, and not 128"), (1024, "")])
def test_r6_c30_fewer_open_extents_than_configured_are_said_once(tmp_path, limit, said):
    out, err = program(_SAYS_SO, tmp_path, limit).communicate(timeout=60)
    assert err == ""
    assert [said in line for line in out.splitlines()] == ([True] if said else [])


_NO_INODES = """
import subprocess
subprocess.run(["mount", "-o", "remount,nr_inodes=60", mnt], check=True)
with t.drive(mnt / "r", layout="{layout}", extent_size="1MiB") as tier:
    assert tier.store(t.rows(t.A)).error is None
    try:
        for number in range(100):
            (mnt / str(number)).touch()
    except OSError:
        pass
    errors = [tier.store(t.rows(*t.KEYS[begin : begin + 20])).error for begin in range(1, 101, 20)]
    assert any(error and "no inode left" in error for error in errors), errors
"""


@pytest.mark.parametrize("layout", ["extents", "files"])
def test_r12_c33_used_up_inodes_are_named(tmp_path, layout):
    run_on("tmpfs", tmp_path, _NO_INODES.format(layout=layout))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_b15_c33_a_file_system_that_syncs_nothing_is_refused_at_the_start(
    tmp_path, monkeypatch, number, has_blocks
):
    if has_blocks:
        with drive(tmp_path) as tier:
            assert tier.store(rows(A)).error is None

    def refuse(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(
        TierOpenError, match=r'syncs no files .*set root to another file system, or layout = "files"'
    ):
        drive(tmp_path)
    with drive(tmp_path / "files", layout="files") as tier:
        assert tier.store(rows(A)).error is None
        assert tier.load([A]).rows == rows(A)
