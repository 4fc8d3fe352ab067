import importlib
import inspect
import subprocess
import sys

import pytest

import kvtier_core

MODULES = ("kvtier_core", "kvtier_core.tier", "kvtier_core.engine")
NAMES = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]


def _run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_core_brings_in_none_of_the_heavy_packages():
    assert (
        _run(
            "import sys, kvtier_core; assert dir(kvtier_core);"
            "print([name for name in ('torch', 'numpy', 'pydantic', 'pluggy', 'xxhash') if name in sys.modules])"
        )
        == "[]"
    )


def test_no_public_module_needs_torch():
    assert _run(f"import sys, {', '.join(MODULES)}; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_every_public_name_is_there_and_documented(module, name):
    value = getattr(importlib.import_module(module), name)
    assert getattr(importlib.import_module(module), name) is value
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value), f"{name} has no docstring"


@pytest.mark.parametrize("module", MODULES)
def test_the_lists_are_sorted_and_seen_by_dir(module):
    module = importlib.import_module(module)
    assert list(module.__all__) == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("name", ["BlockTier", "EngineSession"])
def test_a_name_of_before_still_works_and_says_where_it_is_now(name):
    with pytest.warns(DeprecationWarning, match=rf"kvtier_core\.(tier|engine)\.{name} now"):
        value = getattr(kvtier_core, name)
    assert value in (vars(importlib.import_module(module)).get(name) for module in MODULES[1:])


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'Nonsense'"):
        _ = kvtier_core.Nonsense
