"""A wheel of tiers written against kvtier-core 0.1 works with this state: it is built here and is not changed any more.

It is kept as source, because a wheel in the repository could not be reviewed. Its digest is pinned: whoever has to
change it breaks the tiers of others.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "first_release"
DIGEST = "1b55c5d3d69d2bcc16ead6de0acfb4697b16dfbe2ff1818440d8fd69ea2040d3"
TESTS = """
import pytest
from kvtier_core import load_tier_type
from kvtier_testing import TierTests

class TestFiles(TierTests):
    @pytest.fixture
    def tier_class(self):
        return load_tier_type("first_files").cls
    @pytest.fixture
    def tier_settings(self, tmp_path):
        return {"root": tmp_path / "root"}
    @pytest.fixture
    def unusable_settings(self):
        return {"root": "/dev/null/root"}

class TestJobs(TierTests):
    @pytest.fixture
    def tier_class(self):
        return load_tier_type("first_jobs").cls
"""
CONFIG = """
[tiers.files]
type = "first_files"
root = "blocks"

[tiers.jobs]
type = "first_jobs"
"""


def run(place: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a module of this interpreter in *place*, where the wheel is installed."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{place / 'installed'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with the wheel's content in ``installed``."""
    place = tmp_path_factory.mktemp("first")
    pip = (
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    )
    done = run(place, *pip, "--target", place / "installed", SOURCE)
    assert done.returncode == 0, done.stderr
    return place


def test_i21_the_source_of_the_first_release_is_not_changed():
    files = sorted(path for path in SOURCE.rglob("*") if path.suffix in {".py", ".toml"})
    content = b"".join(str(path.relative_to(SOURCE)).encode() + path.read_bytes() for path in files)
    assert hashlib.sha256(content).hexdigest() == DIGEST, (
        "tests/plugins/first_release stands for the tiers of others: change the core instead"
    )


@pytest.mark.timeout(600)
def test_i21_tiers_of_the_first_release_pass_the_kit(place):
    (place / "test_first.py").write_text(TESTS)
    done = run(place, "pytest", "-q", "-p", "no:cacheprovider", "test_first.py")
    assert done.returncode == 0, done.stdout[-5000:]


def test_i21_tiers_of_the_first_release_are_listed_and_work(place):
    (place / "kvtier.toml").write_text(CONFIG)
    done = run(place, "kvtier.main", "doctor", "--config", "kvtier.toml", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {tier["type"]: (tier["ok"], tier["left_behind"]) for tier in found["tiers"]} == {
        "first_files": (True, None),
        "first_jobs": (True, None),
    }
