import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs_torch  # the package under test is installed only where torch is


def python(source):
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout


def test_c50_commands_are_found_and_their_help_needs_no_torch():
    source = """
import argparse, sys
from kvtier import run_command
from kvtier.commands import load_command
for command in (load_command("demo"), run_command):
    command.add_arguments(argparse.ArgumentParser())
    assert command.help
for heavy in ("torch", "transformers", "rich"):
    assert heavy not in sys.modules, heavy
print("fine")
"""
    assert python(source) == "fine\n"


def test_the_package_itself_needs_no_torch_and_names_what_it_has():
    source = """
import sys, kvtier_transformers
assert "torch" not in sys.modules
assert set(kvtier_transformers.__all__) <= set(dir(kvtier_transformers))
for name in kvtier_transformers.__all__:
    assert getattr(kvtier_transformers, name).__name__ == name
try:
    kvtier_transformers.nothing
except AttributeError as error:
    print(error)
"""
    assert python(source) == "module 'kvtier_transformers' has no attribute 'nothing'\n"
