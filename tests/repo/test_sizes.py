"""No file of the packages is over 400 lines, no function over 60: past that it is two things."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("kvtier_core/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])
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
