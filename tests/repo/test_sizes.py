"""No file outside the tests is over 400 lines, no function over 60, and no module imports itself by way of others."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = (
    "kvtier_core/**/*.py",
    "plugins/*/src/**/*.py",
    "examples/*/src/**/*.py",
    "benchmarks/*.py",
    "noxfile.py",
)
FILES = sorted(path for place in PLACES for path in ROOT.glob(place))
MAX_FILE, MAX_FUNCTION = 400, 60


def complaints(path: Path) -> Iterator[str]:
    """What is too long in a file, with its lines."""
    text = path.read_text()
    count = len(text.splitlines())
    if count > MAX_FILE:
        yield f"{path}: {count} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MAX_FUNCTION:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    assert list(complaints(path)) == [], "split it: which two things is it?"


@pytest.mark.parametrize(("lines", "is_fine"), [(60, True), (61, False)])
def test_a_long_function_is_seen(tmp_path, lines, is_fine):
    path = tmp_path / "some.py"
    path.write_text("def f():\n" + "    pass\n" * (lines - 1))
    assert (list(complaints(path)) == []) is is_fine


@pytest.mark.parametrize(("lines", "is_fine"), [(400, True), (401, False)])
def test_a_long_file_is_seen(tmp_path, lines, is_fine):
    path = tmp_path / "some.py"
    path.write_text("x = 1\n" * lines)
    assert (list(complaints(path)) == []) is is_fine


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """The modules of ours that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= names or {node.module} & modules
    return found


def test_no_circle_of_imports():
    files = {path: path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("kvtier_core/**/*.py")}
    names = {".".join(name.parts).removesuffix(".__init__"): path for path, name in files.items()}
    graph = {name: imports_of(path, set(names)) - {name} for name, path in names.items()}
    assert list(TopologicalSorter(graph).static_order()), "raises CycleError, which names the circle"
