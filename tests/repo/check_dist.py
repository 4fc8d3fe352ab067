"""Looks at built distributions, and at what was installed from them: ``python check_dist.py DIRECTORY``.

A program, not a test module: it runs in an environment that has the wheels and nothing else of this repository.
"""

import email
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution, entry_points
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

SDIST_EXTRAS = {
    "PKG-INFO",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "pyproject.toml",
    ".gitignore",
}  # hatchling adds two of them


def check_wheel(path: Path) -> None:
    """A wheel holds its one package, its metadata and the licence, and says that it is typed."""
    package = path.name.split("-")[0]
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA")))
    strangers = [name for name in names if not name.startswith((f"{package}/", f"{package}-"))]
    assert any(name.endswith("licenses/LICENSE") for name in names), f"{path.name} has no licence"
    assert not strangers, f"{path.name} ships {strangers}"
    assert f"{package}/py.typed" in names, f"{path.name} is not marked as typed"
    check_metadata(path, metadata)
    refuse_rubbish(path, names)


def check_metadata(path: Path, metadata: bytes) -> None:
    """A wheel says what it is, under which licence, for which Python, and what it needs."""
    fields = email.message_from_bytes(metadata)
    name = path.name.split("-")[0].replace("_", "-")
    assert fields["Name"] == name, f"{path.name} is called {fields['Name']}"
    assert fields["Version"] == path.name.split("-")[1]
    assert fields["License-Expression"] == "Apache-2.0", f"{path.name} has no licence expression"
    assert fields["Requires-Python"] == ">=3.11", f"{path.name} requires Python {fields['Requires-Python']}"
    assert fields["Summary"], f"{path.name} has no summary"
    assert str(fields.get_payload()).lstrip().startswith("# kvtier"), f"{path.name} has no readme"
    classifiers = fields.get_all("Classifier", [])
    for wanted in (
        "Typing :: Typed",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
    ):
        assert wanted in classifiers, f"{path.name} lacks the classifier {wanted!r}"
    needs = fields.get_all("Requires-Dist", [])
    core = [need for need in needs if need.startswith("kvtier-core")]
    assert core or name == "kvtier-core", f"{path.name} does not need kvtier-core"
    assert all(">=0.9" in need and ("<2" in need or "<0.10" in need) for need in core), (
        f"{path.name} needs {core}"
    )
    if name in {
        "kvtier-llamacpp",
        "kvtier-sglang",
        "kvtier-transformers",
        "kvtier-vllm",
    }:  # those that are not installed where this runs
        assert core[0].startswith("kvtier-core[torch]"), f"{path.name} needs {core}"


def check_sdist(path: Path) -> None:
    """A source distribution holds its one package and what its build needs."""
    package = path.name.split("-")[0]
    with tarfile.open(path) as archive:
        names = [str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()]
    strangers = [
        name
        for name in names
        if name not in SDIST_EXTRAS and not name.startswith((package, f"src/{package}"))
    ]
    assert not strangers, f"{path.name} ships {strangers}"
    refuse_rubbish(path, names)


def refuse_rubbish(path: Path, names: Iterable[str]) -> None:
    """Nothing compiled, no tests."""
    rubbish = [name for name in names if name.endswith(".pyc") or "tests/" in name]
    assert not rubbish, f"{path.name} ships {rubbish}"


def check_installed() -> None:
    """What is imported here comes from the wheels, and works without torch."""
    import kvtier_core

    home = Path(kvtier_core.__file__)
    assert "site-packages" in home.parts, f"kvtier_core comes from {home}"
    assert home.is_relative_to(sys.prefix), f"kvtier_core comes from {home}"
    assert find_spec("torch") is None, "torch is installed here"
    assert kvtier_core.__version__ == distribution("kvtier-core").version
    for name in kvtier_core.__all__:
        getattr(kvtier_core, name)
    for entry in entry_points(group="kvtier.tiers.v1"):
        kvtier_core.load_tier_type(entry.name)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    wheels, sdists = sorted(directory.glob("*.whl")), sorted(directory.glob("*.tar.gz"))
    assert wheels, f"no wheels in {directory}"
    assert len(wheels) == len(sdists)
    for wheel in wheels:
        check_wheel(wheel)
    for sdist in sdists:
        check_sdist(sdist)
    check_installed()
    print(f"{len(wheels)} wheels and {len(sdists)} source distributions are as they should be")
