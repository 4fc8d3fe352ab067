"""A root that an engine of an earlier version of kvtier uses, or has used: it kept its index with a write-ahead log."""

import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.main import main
from kvtier_core.errors import TierOpenError
from kvtier_testing.driving import PATIENCE_S
from tests.tiers.extents import MIB, A, B, drive, extent_files, index_file, program, rows

# A stand-in for such an engine: its index and its sign of life, as it had them, and what it does with them.
_EARLIER = """
import pathlib, signal, sqlite3, sys
from kvtier_disk.extents.lock import LifeSign
from kvtier_disk.folder import Folder
root, version = pathlib.Path(sys.argv[1]), int(sys.argv[2])
sign = LifeSign(Folder(root / ".kvtier" / "alive"))
(path,) = (root / ".kvtier").glob("index-*.db")
index = sqlite3.connect(path, isolation_level=None)
index.execute("PRAGMA journal_mode = WAL")
index.execute(f"PRAGMA user_version = {version}")
print("ready", flush=True)
for _ in sys.stdin:
    index.execute("UPDATE namespaces SET used = used + 1")
    print(index.execute("SELECT count(*) FROM extents").fetchone()[0], flush=True)
signal.pause()
"""
VERSIONS = pytest.mark.parametrize("version", [1, 2])  # it can use an index of this version's form, and does


@pytest.fixture
def root(tmp_path) -> Path:
    with drive(tmp_path, capacity=16 * MIB) as tier:
        assert tier.store(rows(A, B)).error is None
    return tmp_path


@pytest.fixture
def start_earlier(root) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Start an engine of an earlier version, with an index of a version's form."""
    started: list[subprocess.Popen[str]] = []

    def start(version: int) -> subprocess.Popen[str]:
        earlier = program(_EARLIER, root, version)
        started.append(earlier)
        assert earlier.stdout.readline() == "ready\n"
        return earlier

    yield start
    for earlier in started:
        earlier.kill()
        earlier.communicate(timeout=PATIENCE_S)


def content_of(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in [index_file(root), *extent_files(root)]}


@VERSIONS
def test_c33_beside_an_engine_of_an_earlier_version_nothing_starts_and_nothing_changes(
    root, start_earlier, version, capsys
):
    earlier = start_earlier(version)
    before = content_of(root)
    with pytest.raises(TierOpenError, match="engines of an earlier version .* stop all engines"):
        drive(root, capacity=16 * MIB)
    assert main(["disk", "rebuild", str(root)]) != 0
    assert "engines of an earlier version" in capsys.readouterr().err
    with pytest.raises(TierOpenError, match="an earlier version of kvtier uses it"):
        drive(root, read_only=True)
    assert main(["disk", "status", str(root)]) != 0
    assert "an earlier version of kvtier uses it" in capsys.readouterr().err
    assert content_of(root) == before
    earlier.stdin.write("\n")
    earlier.stdin.flush()
    assert earlier.stdout.readline() == "1\n"
    assert sqlite3.connect(index_file(root)).execute("PRAGMA quick_check").fetchone() == ("ok",)


@VERSIONS
def test_c33_what_an_engine_of_an_earlier_version_has_left_is_taken_over(root, start_earlier, version):
    earlier = start_earlier(version)
    earlier.kill()
    earlier.wait(PATIENCE_S)
    with drive(root, capacity=16 * MIB) as one, drive(root, capacity=16 * MIB) as other:
        assert one.load([A, B]).rows == other.load([A, B]).rows == rows(A, B)
