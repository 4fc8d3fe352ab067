"""What pytest collects for ``kvtier check``: the rules, on the tier and the storage that an operator has configured."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvtier_testing.check.running import PATIENCE_S, PAYLOAD_BYTES, Run
from kvtier_testing.fixtures import Spaces
from kvtier_testing.tiers import TierTests


class TestConfigured(TierTests):
    """Every test has namespaces of its own, which are removed after it."""

    payload_bytes = PAYLOAD_BYTES
    patience_s = PATIENCE_S
    full_rounds = 5
    is_in_use = True

    @pytest.fixture
    def tier_class(self, run: Run) -> type[Any]:
        """The class that serves these settings."""
        return run.tier.cls

    @pytest.fixture
    def tier_settings(self, run: Run) -> Mapping[str, object]:
        """The operator's."""
        return run.tier.values

    @pytest.fixture
    def spaces(self, run: Run) -> Iterator[Spaces]:
        """Namespaces that nobody else has."""
        spaces = run.new_spaces()
        yield spaces
        run.remove(spaces)
