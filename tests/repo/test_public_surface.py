import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier_core

SOURCE = Path(kvtier_core.__file__)


def _names_for_type_checkers():
    tree = ast.parse(SOURCE.read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_importing_the_core_brings_in_none_of_the_heavy_packages():
    program = (
        "import sys, kvtier_core; assert dir(kvtier_core);"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'pluggy', 'xxhash') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", kvtier_core.__all__)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(kvtier_core, name)
    assert getattr(kvtier_core, name) is value
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value), f"{name} has no docstring"


def test_type_checkers_see_what_is_there():
    seen = _names_for_type_checkers()
    assert {*seen, "__version__"} == set(kvtier_core.__all__)
    for name, module in seen.items():
        assert getattr(importlib.import_module(module), name) is getattr(kvtier_core, name)


def test_dir_shows_the_public_names():
    assert set(kvtier_core.__all__) <= set(dir(kvtier_core))


def test_the_list_is_sorted():
    assert list(kvtier_core.__all__) == sorted(kvtier_core.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'Nonsense'"):
        _ = kvtier_core.Nonsense


def test_every_public_name_can_be_imported_without_torch_except_through_an_engine():
    program = (
        "import sys, kvtier_core\n"
        "for name in kvtier_core.__all__: getattr(kvtier_core, name)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
