"""The disk tier's extents: the conformance tests."""

from typing import Any

import pytest

from kvtier_core.testing.tiers import TierTests
from kvtier_disk import DiskTier


class TestExtents(TierTests):
    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return DiskTier

    @pytest.fixture
    def tier_settings(self, tmp_path):
        return {"root": tmp_path / "root", "min_free": 0}


class TestExtentsWithLargeRows(TestExtents):
    payload_bytes = 737_280
