"""Tests for an environment that has our wheels, no torch and no repository: what is found, and the command line.

``nox -s packaging`` copies this file into an empty directory and runs it there with pytest.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier_core
from kvtier_core import load_tier_type

TIER_TYPES = ("async_example", "disk", "fsspec", "memory", "mooncake", "shelf", "sqlite", "valkey")
CONFIG = """
[pool]
capacity = "64MiB"

[tiers.fast]
type = "memory"

[tiers.files]
type = "disk"
root = "blocks"

[tiers.mine]
type = "shelf"
path = "blocks.sqlite"
"""


def kvtier(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in *place*."""
    return subprocess.run(
        [Path(sys.executable).parent / "kvtier", *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a configuration."""
    tmp_path.joinpath("kvtier.toml").write_text(CONFIG)
    return tmp_path


def test_everything_comes_from_the_wheels() -> None:
    for name in TIER_TYPES:
        module = sys.modules[load_tier_type(name).cls.__module__]
        assert "site-packages" in Path(str(module.__file__)).parts
    assert "site-packages" in Path(kvtier_core.__file__).parts
    assert "torch" not in sys.modules


def test_the_version(place: Path) -> None:
    assert kvtier(place, "--version").stdout == f"kvtier {kvtier_core.__version__}\n"


def test_every_tier_type_policy_and_command_is_listed(place: Path) -> None:
    done = kvtier(place, "list", "--json")
    assert done.returncode == 0, done.stderr
    listed = {entry["name"]: entry["status"] for entry in json.loads(done.stdout)}
    assert listed == dict.fromkeys((*TIER_TYPES, "arc", "s3fifo", "object", "bench", "check"), "available")


def test_the_configuration_is_shown(place: Path) -> None:
    done = kvtier(place, "config", "--config", "kvtier.toml")
    assert done.returncode == 0, done.stderr
    assert "tiers.files.root" in done.stdout


def test_the_doctor_tries_every_tier(place: Path) -> None:
    done = kvtier(place, "doctor", "--config", "kvtier.toml", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert len(report["tiers"]) == 3


@pytest.mark.parametrize("command", ["demo", "run --model m --prompts p"])
def test_a_command_that_needs_another_package_says_which(place: Path, command: str) -> None:
    done = kvtier(place, *command.split())
    assert done.returncode == 2
    assert "pip install kvtier-transformers" in done.stderr
    assert "Traceback" not in done.stderr
