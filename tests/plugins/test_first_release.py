"""A wheel of tiers written against kvtier-core 0.1 works with this state: it is built here and is not changed any more.

It is kept as source, because a wheel in the repository could not be reviewed. Its digest is pinned: whoever has to
change it breaks the tiers of others.
"""

import dataclasses
import hashlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier_core
from kvtier_core import policies, tier

SOURCE = Path(__file__).parent / "first_release"
DIGEST = "8a5861e57fd3cb13cbec1ea9df151b34eeca7e84b59440ca8aac7af119e67d4b"
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


def surface() -> dict[str, dict[str, list[str]]]:
    """The names of the tier interface: its modules, the parameters of its methods, the fields of its values."""
    found: dict[str, dict[str, list[str]]] = {"names": {}, "methods": {}, "fields": {}}
    for module in (kvtier_core, tier, policies):
        found["names"][module.__name__] = sorted(module.__all__)
    for name in tier.__all__:
        cls = getattr(tier, name)
        if dataclasses.is_dataclass(cls):
            found["fields"][name] = [field.name for field in dataclasses.fields(cls)]
        elif hasattr(cls, "model_fields"):
            found["fields"][name] = list(cls.model_fields)
        elif name in {"BlockTier", "TierHookSpecs"} or name.startswith("Supports"):
            for method, function in inspect.getmembers(cls, inspect.isfunction):
                if not method.startswith("_"):
                    found["methods"][f"{name}.{method}"] = list(inspect.signature(function).parameters)
    return found


def test_i21_what_v1_holds_still_is_still_there():
    """Methods keep their parameters. Names and fields may be added; a new field of a value has a default."""
    first, now = json.loads((SOURCE / "v1.json").read_text()), surface()
    assert {name: now["methods"].get(name) for name in first["methods"]} == first["methods"]
    for kind in ("names", "fields"):
        for owner, names in first[kind].items():
            assert set(names) <= set(now[kind][owner]), f"{owner} has lost a name"
    for value, names in first["fields"].items():
        cls = getattr(tier, value)
        if dataclasses.is_dataclass(cls):
            required = {
                field.name
                for field in dataclasses.fields(cls)
                if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            }
            assert required <= set(names), f"a new field of {value} has no default"


def test_i21_the_source_of_the_first_release_is_not_changed():
    files = sorted(path for path in SOURCE.rglob("*") if path.suffix in {".json", ".py", ".toml"})
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
