"""The disk tier."""

from typing import Any

import pytest

from kvtier_core.testing.tiers import TierTests
from kvtier_disk import DiskTier


class TestDisk(TierTests):
    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return DiskTier

    @pytest.fixture
    def tier_settings(self, tmp_path):
        return {"root": tmp_path / "root"}
