"""What the tests of a tier stand on: the fixtures a subclass provides, and those made of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from kvtier_core.plugins.check import check_tier_class
from kvtier_core.values import TierInfo
from kvtier_testing.driving import TierDriver
from kvtier_testing.rows import RowMaker

OpenTier = Callable[..., TierDriver]

NAMESPACE = "kit-namespace"


class TierFixtures:
    """Fixtures of every tier test.

    ``payload_bytes`` is the size of the blocks they use; ``full_rounds`` how often blocks are stored into a full tier:
    fewer do for one whose every call crosses a network.
    """

    payload_bytes = 5000
    full_rounds = 50

    # What a subclass provides, and what is made of it.

    @pytest.fixture
    def tier_class(self) -> type[Any]:
        """The tier to test."""
        raise NotImplementedError("define the fixture tier_class: it returns the tier to test")

    @pytest.fixture
    def tier_settings(self) -> Mapping[str, object]:
        """The tier's own settings."""
        return {}

    @pytest.fixture
    def info(self, tier_class: type[Any]) -> TierInfo:
        """What the tier says about itself."""
        info = tier_class.info
        assert isinstance(info, TierInfo), f"{tier_class.__name__}.info must be a TierInfo, not {info!r}"
        return info

    @pytest.fixture
    def maker(self) -> RowMaker:
        """Rows of the namespace that tiers are opened with."""
        return RowMaker(NAMESPACE, self.payload_bytes)

    @pytest.fixture
    def open_tier(
        self, tier_class: type[Any], tier_settings: Mapping[str, object], maker: RowMaker
    ) -> Iterator[OpenTier]:
        """Opens the tier: ``open_tier(capacity_blocks=None, namespace=..., **core_settings)``; shut down at the end."""
        check_tier_class(tier_class)  # what is wrong with the class, in words, before anything fails for it
        with ExitStack() as stack:

            def open_one(
                *, capacity_blocks: int | None = None, namespace: str = NAMESPACE, **core_settings: object
            ) -> TierDriver:
                settings = tier_class.Settings.model_validate(
                    {"type": "kit", **tier_settings, **core_settings}
                )
                capacity = None if capacity_blocks is None else capacity_blocks * maker.row_bytes
                driver = TierDriver(
                    tier_class,
                    settings,
                    row_bytes=maker.row_bytes,
                    namespace=namespace,
                    capacity_bytes=capacity,
                )
                return stack.enter_context(driver)

            yield open_one
