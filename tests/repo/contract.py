"""The kit for the one tier type that is installed.

``nox -s contract`` copies this file into an empty directory and runs it there, where the wheels of the core, the kit
and that tier are installed and no other of kvtier's.
"""

import sys
from collections.abc import Mapping
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any

import pytest

from kvtier_core import load_tier_type
from kvtier_testing import TierTests

(_OFFER,) = entry_points(group="kvtier.tiers.v1")
TIER = load_tier_type(_OFFER.name)


class TestTier(TierTests):
    least_blocks = 100  # the disk tier's index takes half a MiB

    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return TIER.cls

    @pytest.fixture
    def tier_settings(self, tmp_path: Path) -> Mapping[str, object]:
        places = {"root": tmp_path / "root", "url": f"file://{tmp_path}/root", "path": tmp_path / "blocks"}
        return {name: place for name, place in places.items() if name in TIER.cls.Settings.model_fields}


def test_no_other_distribution_of_kvtier_is_installed() -> None:
    names = {found.name for found in distributions() if found.name.startswith("kvtier")}
    assert names == {"kvtier-core", "kvtier-testing", TIER.distribution}
    assert "site-packages" in Path(str(sys.modules[TIER.cls.__module__].__file__)).parts
