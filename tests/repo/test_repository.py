import itertools
import re
import socket
import tomllib
from pathlib import Path

import pytest
import pytest_socket

from kvtier_core import check_tier_class, load_tier_type
from kvtier_core.hookspecs import TIER_GROUP
from kvtier_core.plugins.discovery import find_offers

ROOT = Path(__file__).parents[2]
PROJECTS = [
    ROOT / "pyproject.toml",
    *sorted(ROOT.glob("plugins/*/pyproject.toml")),
    *sorted(ROOT.glob("examples/*/pyproject.toml")),
]


def _project(path):
    return tomllib.loads(path.read_text())["project"]


OURS = [
    (name, _project(path)["name"])
    for path in PROJECTS
    for name in _project(path).get("entry-points", {}).get("kvtier.tiers.v1", {})
]


@pytest.mark.parametrize(("name", "distribution"), OURS)
def test_c51_every_tier_type_of_this_repository_is_accepted(name, distribution):
    tier_type = load_tier_type(name)
    assert tier_type.distribution == distribution
    check_tier_class(tier_type.cls)


def test_c50_every_tier_type_of_this_repository_is_installed():
    installed = {(item.name, item.distribution) for item in find_offers(TIER_GROUP)}
    assert set(OURS) <= installed


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_every_distribution_says_what_it_is(path):
    project = _project(path)
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    assert project["description"]
    assert project["keywords"]
    assert "Typing :: Typed" in project["classifiers"]
    assert (path.parent / project["readme"]).is_file()
    assert project["license-files"] == ["LICENSE"]
    assert (path.parent / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    changes = (path.parent / "CHANGELOG.md").read_text()
    assert changes.startswith(f"# Changes of {project['name']}\n")
    assert f"\n## {project['version']} " in changes
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    tables = tomllib.loads(path.read_text())["tool"]["hatch"]["build"]["targets"]
    assert {"README.md", "CHANGELOG.md", "LICENSE"} < set(tables["sdist"]["only-include"])
    assert tables["wheel"]["packages"], "the wheel must be an allow-list"
    for package in tables["wheel"]["packages"]:
        assert (path.parent / package / "py.typed").is_file()


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_every_dependency_has_a_lowest_version_that_minimums_can_try(path):
    project = _project(path)
    extras = project.get("optional-dependencies", {}).values()
    for need in itertools.chain(project["dependencies"], *extras):
        assert ">=" in need, need
        if need.startswith("kvtier"):
            assert need.endswith(f">=0.9,{'<2' if _keeps_to_v1(path) else '<0.10'}")


def _keeps_to_v1(path: Path) -> bool:
    """Whether it imports nothing of the core but what v1 holds still: docs/reference/versions.md."""
    sources = [file.read_text() for file in (path.parent / "src").rglob("*.py")]
    imported = {
        name
        for text in sources
        for name in re.findall(r"^\s*(?:from|import) (kvtier_core[\w.]*)", text, re.MULTILINE)
    }
    return imported <= {"kvtier_core", "kvtier_core.tier", "kvtier_core.policies"}


def test_a_new_tier_needs_the_core_as_ours_do():
    template = (ROOT / "plugins/kvtier/src/kvtier/new_tier/templates/pyproject.toml.in").read_text()
    assert re.findall(r'"(kvtier-[a-z]+>.*?)"', template) == ["kvtier-core>=0.9,<2", "kvtier-testing>=0.9,<2"]


def test_all_distributions_have_one_version():
    """One tag releases them all."""
    assert len({_project(path)["version"] for path in PROJECTS}) == 1


def test_constraints_pin_torch_once():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if line.startswith("torch")] == ["torch==2.13.0"]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+(post\d+)?", line) for line in lines)


@pytest.mark.filterwarnings("ignore:A test tried to use socket")
def test_no_test_reaches_further_than_this_machine():
    with (
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as outside,
        pytest.raises(pytest_socket.SocketConnectBlockedError),
    ):
        outside.connect(("192.0.2.1", 80))


def test_loopback_is_open():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        assert client.getpeername() == server.getsockname()


def test_warnings_are_errors(request):
    assert request.config.getini("filterwarnings")[0] == "error"
    assert request.config.getini("timeout_method") == "thread"
    assert request.config.pluginmanager.hasplugin("randomly")


SOURCES = [
    path
    for pattern in (
        "*.toml",
        "*.md",
        "*.py",
        "*.txt",
        "kvtier_core/**/*.py",
        "examples/**/*.*",
        "plugins/**/*.*",
        "tests/**/*.py",
        "docs/**/*",
    )
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix in {".toml", ".md", ".py", ".txt"}
]
REGISTRIES = ["py" + "pi.org", "python" + "hosted", "pytorch" + ".org/whl", "index" + "-url"]


@pytest.mark.parametrize("word", REGISTRIES)
def test_no_file_names_a_package_registry(word):
    assert len(SOURCES) > 50
    assert [str(path) for path in SOURCES if word in path.read_text()] == []


@pytest.mark.parametrize(
    "page",
    [ROOT / "CONTRIBUTING.md", ROOT / ".ci/run", *sorted(ROOT.glob(".github/workflows/*.yml"))],
    ids=lambda page: page.name,
)
def test_every_session_that_is_named_exists(page):
    sessions = set(
        re.findall(r'^def (\w+)\(session|name="([\w-]+)"', (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    )
    known = {name for pair in sessions for name in pair}
    named = re.findall(r"nox (?:--\S+ )*-s ((?:[a-z][\w-]* ?)+)", page.read_text())
    assert {name for names in named for name in names.split()} <= known
