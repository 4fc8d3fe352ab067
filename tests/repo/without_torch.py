"""A pytest plugin for environments without torch: leaves out the tests that import it, and says how many those are.

``python -m pytest -p tests.repo.without_torch``. A test file is left out when it, its ``conftest.py`` or a module of
``tests`` that it imports, imports at its top one of ``NEED_TORCH``; and a test that starts a program which does, when
it is marked ``needs_torch``. Nothing else is left out: any other test that needs torch fails.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEED_TORCH = frozenset(
    {
        "torch",
        "transformers",
        "safetensors",
        "tokenizers",
        "kvtier_llamacpp",
        "kvtier_sglang",
        "kvtier_transformers",
        "kvtier_vllm",
        "kvtier_core.transfer.CPUDevice",
        "kvtier_core.transfer.cpu",
    }
)

_left_out: Counter[Path] = Counter()
"""Tests left out, by file; of a file that was not even imported, the test functions."""


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run where torch is: there, everything can be tried."""
    if find_spec("torch") is not None:
        raise pytest.UsageError("torch is installed here: run the tests without -p tests.repo.without_torch")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out a file that needs torch, or a folder whose ``conftest.py`` does (``True``); else no opinion."""
    if collection_path.is_dir():
        if not needs_torch(collection_path / "conftest.py"):
            return None
        _left_out.update({path: count_tests(path) for path in collection_path.rglob("test_*.py")})
        return True
    if not needs_torch(collection_path):
        return None
    if collection_path.name.startswith("test_"):
        _left_out[collection_path] = count_tests(collection_path)
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked."""
    marked = [item for item in items if item.get_closest_marker("needs_torch") is not None]
    if marked:
        _left_out.update(item.path for item in marked)
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """Say what was left out."""
    terminalreporter.write_line(
        f"left out, because they need torch: {_left_out.total()} tests in {len(_left_out)} files"
    )
    for path, tests in sorted(_left_out.items()):
        terminalreporter.write_line(f"  {path.relative_to(ROOT)}: {tests}")


@cache
def needs_torch(path: Path) -> bool:
    """Whether the module at *path* imports one of ``NEED_TORCH``, itself or through a module of ``tests``."""
    if path.suffix != ".py" or not path.is_file():
        return False
    return any(
        any(f"{name}.".startswith(f"{heavy}.") for heavy in NEED_TORCH)
        or (name.startswith("tests.") and needs_torch(ROOT / (name.replace(".", "/") + ".py")))
        for name in _imports(path)
    )


def count_tests(path: Path) -> int:
    """The test functions in a file; a parametrized one counts once."""
    functions = (node for node in ast.walk(_tree(path)) if isinstance(node, ast.FunctionDef))
    return sum(node.name.startswith("test_") for node in functions)


def _imports(path: Path) -> Iterator[str]:
    for node in _tree(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
