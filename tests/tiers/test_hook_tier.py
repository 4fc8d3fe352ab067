"""A tier on the hook specs passes the same tests as one on the blocking interface."""

from typing import Any

import pytest

from kvtier_testing.faulty import FaultyTier
from kvtier_testing.tiers import TierTests


class TestHookTier(TierTests):
    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return FaultyTier
