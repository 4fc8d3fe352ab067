"""The transfer path imports where nothing else of kvtier is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier_core import transfer

_DEVICES = {"cpu", "cuda", "selftest", "streams"}
_ABSENT = ("pluggy", "pydantic", "pydantic_settings", "pydantic_core", "xxhash")


def _loaded_after(statement: str, absent: tuple[str, ...]) -> set[str]:
    """Run *statement* in a new process that can't import *absent*; return its modules."""
    script = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"
        f"{statement}\n"
        "print(*(name for name, module in sys.modules.items() if module is not None))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def _core_modules(loaded: set[str]) -> set[str]:
    return {name for name in loaded if name.startswith("kvtier_core.")}


@pytest.mark.parametrize(
    "module",
    sorted(
        path.stem for path in Path(transfer.__file__).parent.glob("[!_]*.py") if path.stem not in _DEVICES
    ),
)
def test_all_but_the_device_modules_import_without_torch(module: str) -> None:
    loaded = _loaded_after(f"import kvtier_core.transfer.{module}", (*_ABSENT, "torch"))
    assert f"kvtier_core.transfer.{module}" in loaded


@pytest.mark.needs_torch
def test_the_transfer_path_imports_nothing_else_of_the_core() -> None:
    loaded = _loaded_after("from kvtier_core.transfer import *", _ABSENT)
    assert "kvtier_core.transfer.cpu" in loaded
    assert {name for name in _core_modules(loaded) if not name.startswith("kvtier_core.transfer")} == set()


def test_the_package_itself_loads_nothing_until_asked() -> None:
    assert _core_modules(_loaded_after("import kvtier_core.transfer", ())) == {"kvtier_core.transfer"}


def test_the_cores_direction_is_the_transfer_paths_direction() -> None:
    from kvtier_core import transfer, values

    assert values.Direction is transfer.Direction


def test_an_unknown_name_is_an_attribute_error() -> None:
    from kvtier_core import transfer

    with pytest.raises(AttributeError, match="'Pol'"):
        transfer.Pol  # noqa: B018
