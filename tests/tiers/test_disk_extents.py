"""The disk tier's extents: the conformance tests."""

from typing import Any

import pytest

from kvtier_disk import DiskTier
from kvtier_testing.tiers import TierTests


class TestExtents(TierTests):
    least_blocks = 100  # the index takes half a MiB

    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return DiskTier

    @pytest.fixture
    def tier_settings(self, tmp_path):
        return {"root": tmp_path / "root", "min_free": 0}


class TestExtentsWithLargeRows(TestExtents):
    payload_bytes = 737_280
    least_blocks = 10
